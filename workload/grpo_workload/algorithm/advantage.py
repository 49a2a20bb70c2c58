"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1), as TRL 1.16 computes them.

Each rank computes the advantages of all ranks, and plans the step by which of them are 0. So the arithmetic gives the
same bits on every processor: sums are rounded once (`math.fsum`), in float64, and do not depend on their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

ScaleRewards = Literal["group", "batch", "none"]

_EPS = 1e-4  # TRL's value


def group_advantages(rewards: Sequence[float], num_generations: int, scale_rewards: ScaleRewards) -> list[float]:
    """Compute the advantages from the rewards of the whole step, over all ranks, in the same order.

    Rewards of a prompt are adjacent. The advantage is the reward minus the mean of its prompt group, divided by
    std + 1e-4. `scale_rewards` says which std: the prompt group's (`group`), that of all rewards (`batch`), or no
    division at all (`none`). Means and deviations ignore NaN rewards. A NaN reward gets advantage 0, and so do equal
    rewards of a whole group, exactly.
    """
    groups = as_groups(rewards, num_generations)
    stds = reward_stds(rewards, num_generations, scale_rewards)
    return [
        _advantage(reward - average, None if scale_rewards == "none" else std)
        for group, std, average in zip(groups, stds, map(mean, groups), strict=True)
        for reward in group
    ]


def _advantage(difference: float, std: float | None) -> float:
    if not difference or math.isnan(difference):  # so 0 stays 0, whatever is known of the deviation
        return 0.0
    return difference if std is None else difference / (std + _EPS)


def as_groups(rewards: Sequence[float], num_generations: int) -> list[Sequence[float]]:
    """Cut the rewards into prompt groups."""
    assert len(rewards) % num_generations == 0, (
        f"{len(rewards)} rewards are not whole prompt groups of {num_generations}"
    )
    return [rewards[start : start + num_generations] for start in range(0, len(rewards), num_generations)]


def reward_stds(rewards: Sequence[float], num_generations: int, scale_rewards: ScaleRewards) -> list[float]:
    """Standard deviation for each prompt group: of its own rewards, or of all rewards with `batch`."""
    groups = as_groups(rewards, num_generations)
    return [std(rewards)] * len(groups) if scale_rewards == "batch" else [std(group) for group in groups]


def mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN if there is none. That of equal values is this value, exactly."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    average = math.fsum(value / len(known) for value in known)  # a sum of the values themselves might overflow
    return min(max(average, min(known)), max(known))


def std(values: Sequence[float]) -> float:
    """Sample standard deviation (Bessel's correction) of the values that are not NaN; NaN for fewer than two."""
    average = mean(values)
    differences = [value - average for value in values if not math.isnan(value)]
    if len(differences) < 2:
        return math.nan
    largest = max(map(abs, differences)) or 1.0  # squares of what it divides do not overflow
    return largest * math.sqrt(math.fsum((one / largest) ** 2 for one in differences) / (len(differences) - 1))
