"""The prompts of a step, the steps of a generation, and groups that are replaced, as tools count them. Pure."""

from __future__ import annotations

import math

from grpo_cli.convert.draft import Draft

MAX_RESAMPLE = 64  # the largest maxResampleTimes


def settle_batch(draft: Draft, ranks: int) -> int:
    """Write how many prompts a step has, and how many steps a generation; return how many optimizer steps it serves."""
    _batch(draft, ranks)
    per_push = _reuse(draft, ranks)
    _resampling(draft)
    return per_push


def _batch(draft: Draft, ranks: int) -> None:
    facts = draft.facts
    if "verl_batch" in facts:
        prompts, why = facts.get("verl_mini_batch", facts["verl_batch"]), "ppo_mini_batch_size"
    elif "per_device" in facts:
        per_device, accumulation = facts["per_device"], int(facts.get("accumulation") or 1)
        generations = draft.value("training.numGenerations")
        completions = per_device * ranks * accumulation
        prompts = math.ceil(completions / generations)
        why = f"{per_device} per device x {ranks} ranks x {accumulation} accumulated / {generations} generations"
        draft.set("training.perDeviceTrainBatchSize", per_device)
        if completions % generations:
            note = f"{completions} completions cannot be divided into groups of {generations}: {prompts} prompts"
            draft.left("batch", why, note, "training.promptsPerStep")
    else:
        return
    draft.set("training.promptsPerStep", prompts, why)


def _reuse(draft: Draft, ranks: int) -> int:
    """Set how many steps share a generation; return how many optimizer steps it serves."""
    facts = draft.facts
    if "verl_batch" in facts:
        name, whole, part = "train_batch_size", facts["verl_batch"], facts.get("verl_mini_batch", facts["verl_batch"])
        why = "train_batch_size / ppo_mini_batch_size"
    else:
        name, part = "steps_per_generation", int(facts.get("accumulation") or 1)
        whole, why = facts.get("steps_per_generation", part), "steps_per_generation / gradient_accumulation_steps"
        if "generation_batch" in facts:
            name, part = "generation_batch_size", part * facts.get("per_device", 1) * ranks
            whole, why = facts["generation_batch"], "generation_batch_size / completions of a step"
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


def _resampling(draft: Draft) -> None:
    """Set how often a step replaces groups of equal rewards; the tools' limits are 3, and none."""
    if not draft.facts.get("dynamic_sample"):
        return
    times = draft.facts.get("resample_times", -1 if "verl_batch" in draft.facts else 3)
    draft.set("training.maxResampleTimes", min(times, MAX_RESAMPLE) if times >= 0 else MAX_RESAMPLE)
    if times:
        _without_staleness(draft, "a step that replaces groups samples them between two steps")


def _without_staleness(draft: Draft, why: str) -> None:
    if draft.fields.get("training.maxStaleness"):
        draft.drop("training.maxStaleness")
        draft.left("async_generate", True, f"{why}, not meanwhile", "training.maxStaleness")
