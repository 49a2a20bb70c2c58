"""The learning rate's schedule, its arguments and its warm-up, which tools tell apart in their own ways. Pure."""

from __future__ import annotations

from grpo_cli.convert.draft import Draft
from grpo_cli.convert.rows import Kind
from grpo_cli.convert.values import is_none, number
from grpo_spec.optimizer import SCHEDULE_ARGUMENTS

_TYPE, _ARGUMENTS, _WARMUP = "training.lrSchedulerType", "training.lrSchedulerKwargs", "training.warmupSteps"


def settle_schedule(draft: Draft, warmup_steps: int) -> None:
    """Write the schedule with those arguments that it takes, and the warm-up if it has one."""
    given = draft.facts.get("schedule_arguments", {})
    arguments = {name: value for name, value in given.items() if not is_none(value)}
    if "verl_batch" in draft.facts:
        arguments = _verl(draft)
    schedule = draft.value(_TYPE)
    taken = {}
    for name, value in arguments.items():
        if name in SCHEDULE_ARGUMENTS[schedule]:
            taken[name] = number(value)
        else:
            draft.left(name, value, f"the schedule {schedule} takes no {name} here", _ARGUMENTS)
    if taken:
        draft.set(_ARGUMENTS, taken)
    if not warmup_steps:
        return
    if schedule == "constant":
        draft.find(Kind.NOT_NEEDED, "warmup", warmup_steps, "the schedule constant has no warm-up", _WARMUP)
    else:
        draft.set(_WARMUP, warmup_steps)


def _verl(draft: Draft) -> dict[str, float]:
    """Verl's `constant` warms up, and its `cosine` may end above 0; it has no others."""
    if draft.fields.get(_TYPE) == "constant":
        draft.set(_TYPE, "constant_with_warmup")
        return {}
    arguments = {}
    if (cycles := draft.facts.get("num_cycles", 0.5)) != 0.5:
        arguments["num_cycles"] = cycles
    if lowest := draft.facts.get("min_lr_ratio", 0):
        draft.set(_TYPE, "cosine_with_min_lr")
        arguments["min_lr_rate"] = lowest
    return arguments
