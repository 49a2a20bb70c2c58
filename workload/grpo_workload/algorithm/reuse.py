"""The batch of prompts that a step trains on, and the steps that one generation serves: pure.

The order is TRL's. With `stepsPerGeneration` k and `numIterations` u, generation g samples the batches g * k ...
g * k + k - 1 at once, and its k * u steps go through them u times. With k = u = 1, step t trains on batch t.
"""

from __future__ import annotations

from grpo_spec.training import TrainingConfig


def steps_of(step: int, training: TrainingConfig) -> range:
    """Steps that train on what is sampled at `step`: those up to the end of its generation, or of the run.

    A run may begin inside a generation, from a checkpoint of other settings: then the rest is sampled.
    """
    length = training.steps_per_push
    return range(step, min((step // length + 1) * length, training.max_steps))


def batch_of(step: int, training: TrainingConfig) -> int:
    """Number of the batch of prompts that `step` trains on."""
    generation, place = divmod(step, training.steps_per_push)
    return generation * training.steps_per_generation + place % training.steps_per_generation


def batches_of(steps: range, training: TrainingConfig) -> dict[int, int]:
    """Return the batches that `steps` of a generation train on, in order, each with the first step that does."""
    first: dict[int, int] = {}
    for step in steps:
        first.setdefault(batch_of(step, training), step)
    return dict(sorted(first.items()))


def batches_from(step: int, training: TrainingConfig) -> range:
    """Return the batches of a run that begins at `step`, from the first of that step's generation."""
    first = step // training.steps_per_push * training.steps_per_generation
    return range(first, max(batches_of(steps_of(training.max_steps - 1, training), training)) + 1)
