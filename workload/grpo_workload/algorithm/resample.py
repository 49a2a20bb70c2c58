"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): which groups teach, and which are trained on. Pure.

Prompts that are sampled for a batch of P have numbers, their slots: 0 ... P - 1 are the batch's own, in order; round r
of further ones begins at r * P. All functions depend only on what every rank knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.advantage import step_advantages


def teaches(
    totals: Sequence[float],
    values: Sequence[Sequence[float | None]],
    weights: Sequence[float],
    training: TrainingConfig,
) -> bool:
    """Whether any completion of one group has an advantage; arguments are those of `step_advantages`."""
    return any(step_advantages(totals, values, weights, [1] * len(totals), training))


def num_further(found: Mapping[int, bool], num_prompts: int) -> int:
    """Return how many further prompts to sample, at most a batch: enough if as many of them teach as of those so far.

    Args:
        found: whether the group of each slot teaches.
        num_prompts: size of the batch.
    """
    good = sum(found.values())
    missing = max(0, num_prompts - good)
    return min(num_prompts, math.ceil(missing * len(found) / good)) if good else num_prompts


def places(found: Mapping[int, bool], num_prompts: int) -> dict[int, int]:
    """Return the position in the batch of each slot that is trained on.

    Groups that teach come first, then the others, in the order of their slots. The batch's own keep their positions.
    """
    kept = sorted(sorted(found, key=lambda slot: (not found[slot], slot))[:num_prompts])
    own = [slot for slot in kept if slot < num_prompts]
    free = (position for position in range(num_prompts) if position not in own)
    return {slot: slot if slot < num_prompts else next(free) for slot in kept}
