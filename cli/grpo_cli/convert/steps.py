"""Prompts of a step, steps of a generation and of the run, its schedule, checkpoints: as tools count them. Pure."""

from __future__ import annotations

import math

from grpo_cli.convert.draft import Draft
from grpo_cli.convert.rows import Kind
from grpo_cli.convert.values import in_steps, is_none, number
from grpo_spec.optimizer import SCHEDULE_ARGUMENTS

MAX_RESAMPLE = 64  # the largest maxResampleTimes
_PROMPTS, _STALENESS = "training.promptsPerStep", "training.maxStaleness"
_SCHEDULE, _ARGUMENTS, _WARMUP = "training.lrSchedulerType", "training.lrSchedulerKwargs", "training.warmupSteps"


def settle_batch(draft: Draft, ranks: int) -> int:
    """Write how many prompts a step has, and how many steps a generation; return how many optimizer steps it serves."""
    facts = draft.facts
    accumulation = int(facts.get("accumulation") or 1)
    if "verl_batch" in facts:
        draft.set(_PROMPTS, facts.get("verl_mini_batch", facts["verl_batch"]), "ppo_mini_batch_size")
    elif "per_device" in facts:
        per_device, generations = facts["per_device"], draft.value("training.numGenerations")
        completions = per_device * ranks * accumulation
        prompts = math.ceil(completions / generations)
        why = f"{per_device} per device x {ranks} ranks x {accumulation} accumulated / {generations} generations"
        draft.set("training.perDeviceTrainBatchSize", per_device)
        if completions % generations:
            note = f"{completions} completions cannot be divided into groups of {generations}: {prompts} prompts"
            draft.left("batch", why, note, _PROMPTS)
        draft.set(_PROMPTS, prompts, why)
    per_push = _reuse(draft, ranks, accumulation)
    if facts.get("dynamic_sample"):  # the tools' limits are 3, and none
        times = facts.get("resample_times", -1 if "verl_batch" in facts else 3)
        draft.set("training.maxResampleTimes", min(times, MAX_RESAMPLE) if times >= 0 else MAX_RESAMPLE)
        if times:
            _without_staleness(draft, "a step that replaces groups samples them between two steps")
    return per_push


def _reuse(draft: Draft, ranks: int, accumulation: int) -> int:
    """Set how many steps share a generation; return how many optimizer steps it serves."""
    facts = draft.facts
    if "verl_batch" in facts:
        name, whole, part = "train_batch_size", facts["verl_batch"], facts.get("verl_mini_batch", facts["verl_batch"])
        why = "train_batch_size / ppo_mini_batch_size"
    elif "generation_batch" in facts:
        name, whole, part = "generation_batch_size", facts["generation_batch"], accumulation * ranks
        part, why = part * facts.get("per_device", 1), "generation_batch_size / completions of a step"
    else:
        name, whole, part = "steps_per_generation", facts.get("steps_per_generation", accumulation), accumulation
        why = "steps_per_generation / gradient_accumulation_steps"
    together = max(1, whole // part)
    # Several generations for one step are sampled with the same weights: here they are one.
    if whole % part and part % whole:
        note = f"{whole} is no multiple of {part}, which are one optimizer step: a generation serves {together}"
        draft.left(name, whole, note, "training.stepsPerGeneration")
    if together > 1:
        draft.set("training.stepsPerGeneration", together, why)
    per_push = int(together * draft.value("training.numIterations"))
    if per_push > 1:
        _without_staleness(draft, f"a generation that serves {per_push} optimizer steps is sampled between them")
    return per_push


def _without_staleness(draft: Draft, why: str) -> None:
    if draft.fields.get(_STALENESS):
        draft.drop(_STALENESS)
        draft.left("async_generate", True, f"{why}, not meanwhile", _STALENESS)


def settle_steps(draft: Draft, rows: int | None, per_push: int) -> None:
    """Write how many steps the run has, its warm-up and schedule, and how often it is saved."""
    facts, prompts = draft.facts, draft.fields.get(_PROMPTS)
    rows = rows or facts.get("rows")
    steps, why = draft.value("training.maxSteps"), "not known: epochs x rows x numIterations / promptsPerStep"
    # verl counts generations, others optimizer steps.
    unit = per_push if "verl_batch" in facts else 1
    if facts.get("max_steps", -1) > 0:
        steps, why = facts["max_steps"], ""
    elif "verl_steps" in facts:
        steps, why = facts["verl_steps"] * unit or steps, f"{facts['verl_steps']} x {unit} optimizer steps"
    elif "epochs" in facts and rows and prompts:
        times = draft.value("training.numIterations")
        steps = max(1, math.floor(facts["epochs"] * rows * times / prompts))
        why = f"{facts['epochs']:g} epochs of {rows} rows{f' x {times}' if times > 1 else ''} / {prompts} prompts"
    elif "epochs" in facts:
        note = f"no file says how many rows the dataset has: {steps} steps are written; give --rows or set maxSteps"
        draft.left("epochs", f"{facts['epochs']:g}", note, "training.maxSteps")
    draft.set("training.maxSteps", steps, why)
    warmup = facts.get("warmup", 0) * unit
    if warmup < 1:
        warmup = (warmup if warmup > 0 else facts.get("warmup_ratio", 0)) * steps
    _schedule(draft, round(warmup))
    if (every := facts.get("save_steps")) is not None:
        every = in_steps(every, steps, unit)
        draft.set("storage.checkpointEverySteps", every if every > 0 else steps)
    match facts.get("save_strategy"):
        case "no":
            draft.set("storage.checkpointEverySteps", steps, "only at the end")
        case "epoch" if "epochs" in facts:
            draft.set("storage.checkpointEverySteps", max(1, round(steps / facts["epochs"])), "an epoch")


def _schedule(draft: Draft, warmup_steps: int) -> None:
    """Write the schedule with those arguments that it takes, and the warm-up if it has one."""
    facts = draft.facts
    arguments = {name: value for name, value in facts.get("schedule_arguments", {}).items() if not is_none(value)}
    if "verl_batch" in facts:  # its `constant` warms up, and its `cosine` may end above 0; it has no others
        arguments = {}
        if draft.fields.get(_SCHEDULE) == "constant":
            draft.set(_SCHEDULE, "constant_with_warmup")
        else:
            if (cycles := facts.get("num_cycles", 0.5)) != 0.5:
                arguments["num_cycles"] = cycles
            if lowest := facts.get("min_lr_ratio", 0):
                draft.set(_SCHEDULE, "cosine_with_min_lr")
                arguments["min_lr_rate"] = lowest
    schedule = draft.value(_SCHEDULE)
    for name in [name for name in arguments if name not in SCHEDULE_ARGUMENTS[schedule]]:
        draft.left(name, arguments.pop(name), f"the schedule {schedule} takes no {name} here", _ARGUMENTS)
    if arguments:
        draft.set(_ARGUMENTS, {name: number(value) for name, value in arguments.items()})
    if warmup_steps and schedule == "constant":
        draft.find(Kind.NOT_NEEDED, "warmup", warmup_steps, "the schedule constant has no warm-up", _WARMUP)
    elif warmup_steps:
        draft.set(_WARMUP, warmup_steps)
