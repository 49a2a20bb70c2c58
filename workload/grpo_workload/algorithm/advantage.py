"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1), as TRL 1.16 computes them.

Each rank computes the advantages of all ranks, and plans the step by which of them are 0. So the arithmetic gives the
same bits on every processor: sums are rounded once (`math.fsum`), in float64, and do not depend on their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Literal

from grpo_spec.training import TrainingConfig

ScaleRewards = Literal["group", "batch", "none"]
Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]

_EPS = 1e-4  # TRL's value
ZERO = 1e-8
"""Up to this, TRL counts a deviation as zero."""
_ROUNDING = 1e-12  # the same as a part of the rewards: sums of large ones are rounded by more


def step_advantages(
    totals: Sequence[float],
    values: Sequence[Sequence[float | None]],
    weights: Sequence[float],
    tokens: Sequence[int],
    training: TrainingConfig,
) -> list[float]:
    """Compute the advantages as the job sets them, from rewards that were sampled together, over all ranks.

    Args:
        totals: [N], weighted sums of the rewards; NaN leaves a completion out.
        values: [F][N], by reward function; None where a function does not score a completion.
        weights: [F], of the functions.
        tokens: [N], numbers of completion tokens.
        training: the job's settings.
    """
    size = training.num_generations
    if training.advantage_estimator == "reinforce_plus_plus_baseline":
        return whitened(group_differences(totals, size), tokens)
    if training.multi_objective_aggregation == "sum_then_normalize":
        return group_advantages(totals, size, training.scale_rewards, training.advantage_estimator)
    # GDPO (arXiv:2601.05242): rewards of each function are normalised in their prompt groups; then their weighted sums
    # are divided by the deviation of all sums. Their mean, which TRL subtracts, is 0 but for rounding.
    known = [[math.nan if value is None else value for value in row] for row in values]
    parts = zip(*(group_advantages(row, size, "group") for row in known), strict=True)
    sums = [
        math.nan if math.isnan(total) else math.fsum(map(mul, weights, row))
        for total, row in zip(totals, parts, strict=True)
    ]
    sums = [one - (one if is_flat([0.0, *group]) else 0.0) for group in as_groups(sums, size) for one in group]
    deviation = std(sums)
    return [_advantage(one, deviation) for one in sums]


def group_advantages(
    rewards: Sequence[float],
    num_generations: int,
    scale_rewards: ScaleRewards,
    estimator: Estimator = "grpo",
) -> list[float]:
    """Compute the advantages from the rewards of the whole step, over all ranks, in the same order.

    Rewards of a prompt are adjacent. The advantage is the reward minus the mean of its prompt group, divided by
    std + 1e-4. `scale_rewards` says which std: the prompt group's (`group`), that of all rewards (`batch`), or no
    division at all (`none`). Means and deviations ignore NaN rewards. A NaN reward gets advantage 0, and so do rewards
    of a whole group that are equal but for rounding (`is_flat`), exactly.

    With the estimator rloo (arXiv:2402.14740) the mean is that of the others of the group. This is the same times
    n / (n - 1): r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1).

    With reinforce_plus_plus (REINFORCE++ with the group's mean as its baseline, arXiv:2501.03262) and `batch`, the std
    is that of the differences: how easy prompts are does not count.
    """
    differences = as_groups(group_differences(rewards, num_generations), num_generations)
    stds = reward_stds(rewards, num_generations, scale_rewards)
    if estimator == "reinforce_plus_plus" and scale_rewards == "batch":
        stds = [std([one for group in differences for one in group])] * len(differences)
    return [
        _advantage(difference * factor, None if scale_rewards == "none" else deviation)
        for group, deviation in zip(differences, stds, strict=True)
        for factor in [_leave_one_out(group) if estimator == "rloo" else 1.0]
        for difference in group
    ]


def group_differences(rewards: Sequence[float], num_generations: int) -> list[float]:
    """Rewards minus the mean of their prompt group; 0 where they are equal but for rounding."""
    return [
        reward - (reward if are_equal else average)
        for group in as_groups(rewards, num_generations)
        for average, are_equal in [(mean(group), is_flat(group))]
        for reward in group
    ]


def whitened(differences: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Subtract the mean over all tokens, and divide by their standard deviation: each completion counts by its length.

    REINFORCE++ with the group's mean as its baseline (arXiv:2501.03262), as verl computes it. So equal
    rewards of a whole group may have an advantage other than 0; a NaN difference gets 0.
    """
    known = [(one, count) for one, count in zip(differences, tokens, strict=True) if not math.isnan(one)]
    total = sum(count for _, count in known)
    if total < 2:
        return [0.0] * len(differences)
    average = math.fsum(one * count for one, count in known) / total
    largest = max(abs(one - average) for one, _ in known) or 1.0  # squares of what it divides do not overflow
    squares = math.fsum(((one - average) / largest) ** 2 * count for one, count in known)
    deviation = math.hypot(largest * math.sqrt(squares / (total - 1)), 1e-4)
    return [0.0 if math.isnan(one) else (one - average) / deviation for one in differences]


def _leave_one_out(group: Sequence[float]) -> float:
    count = sum(not math.isnan(reward) for reward in group)
    return count / max(count - 1, 1)


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


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether two or more rewards are known and those that are known are equal but for rounding: they teach nothing."""
    largest = max((abs(reward) for reward in rewards if not math.isnan(reward)), default=0.0)
    return std(rewards) <= max(ZERO, _ROUNDING * largest)


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
