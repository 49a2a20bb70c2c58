"""The section `evaluation`, which each tool asks for in its own way. Pure."""

from __future__ import annotations

from grpo_cli.convert import values as v
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.sources import name_first, name_swift

_DATASET = "evaluation.dataset"
_ROWS = ("name", "config", "path", "split")
_NOT_FOR_IT = ("dataloaderNumWorkers", "prefetchSteps")


def settle_evaluation(draft: Draft, rows: int | None, per_push: int) -> None:
    """Write the section if the options ask for evaluations of a dataset that they name.

    `rows` is the size of the training's dataset, if known; verl counts generations of `per_push` optimizer steps.
    """
    facts = draft.facts
    is_verl, is_swift = "verl_batch" in facts, "swift_dataset" in facts
    strategy = facts.get("eval_strategy", "steps" if is_swift else "no")
    is_asked = not (v.is_none(strategy) or v.equal(strategy, "no") or v.equal(strategy, False))
    if is_verl:
        is_asked = facts.get("eval_steps", -1) > 0
    if not is_asked or ((is_verl or is_swift) and "eval_dataset" not in facts):
        return
    _dataset(draft, is_swift=is_swift)
    if all(draft.value(f"{_DATASET}.{name}") == draft.value(f"dataset.{name}") for name in _ROWS):
        draft.drop("evaluation")
        draft.left(_DATASET, "that of training", "name other rows: another split, name or path", _DATASET)
        return
    draft.set("evaluation.everySteps", _every(draft, rows, per_push if is_verl else 1))
    draft.set("evaluation.atStart", facts.get("eval_at_start", is_verl))
    count = facts.get("eval_generations", 1 if is_verl else draft.value("training.numGenerations"))
    draft.set("evaluation.numGenerations", count)
    if is_verl:  # it takes the likeliest tokens unless `do_sample` is true
        temperature = facts.get("eval_temperature", 0.0) if facts.get("eval_samples") else 0.0
        if temperature or count == 1:
            draft.set("evaluation.temperature", temperature)
        else:
            note = f"all {count} completions of a problem would be equal: they have training's temperature"
            draft.left("val_kwargs.temperature", temperature, note, "evaluation.temperature")
    _best(draft)


def _dataset(draft: Draft, *, is_swift: bool) -> None:
    named = draft.facts.get("eval_dataset")
    for path, value in list(draft.fields.items()):
        section, _, name = path.partition(".")
        if section == "dataset" and name not in _NOT_FOR_IT and not (named and name in _ROWS):
            draft.set(f"{_DATASET}.{name}", value)
    if not named:
        draft.set(f"{_DATASET}.split", draft.facts.get("eval_split", "test"))
    elif is_swift:
        name_swift(draft, named, _DATASET)
    else:
        name_first(draft, named, _DATASET)


def _every(draft: Draft, rows: int | None, unit: int) -> int:
    steps, prompts = draft.fields["training.maxSteps"], draft.fields.get("training.promptsPerStep")
    if v.equal(draft.facts.get("eval_strategy", ""), "epoch"):
        known = rows or draft.facts.get("rows")
        if known and prompts:
            return max(1, int(known // prompts))
        note = f"no file says how many steps an epoch has: {steps} are written; give --rows or set everySteps"
        draft.left("eval_strategy", "epoch", note, "evaluation.everySteps")
        return int(steps)
    every = draft.facts.get("eval_steps", 10)  # transformers: logging_steps
    return max(1, v.in_steps(every, steps, unit))


def _best(draft: Draft) -> None:
    facts = draft.facts
    if "load_best" in facts:
        draft.set("evaluation.saveBest", facts["load_best"])
    metric = str(facts.get("best_metric", "loss" if facts.get("load_best") else "reward"))
    metric = metric.removeprefix("eval_").removeprefix("eval/")
    if metric == "loss":
        note = "there is no loss of evaluations: the best is the one of the highest eval/reward"
        draft.left("metric_for_best_model", metric, note, "evaluation.metricForBestModel")
        return
    if "best_metric" in facts:
        draft.set("evaluation.metricForBestModel", f"eval/{metric}")
    if "greater_is_better" in facts:
        draft.set("evaluation.greaterIsBetter", facts["greater_is_better"])
