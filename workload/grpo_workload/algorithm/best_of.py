"""Measures of a model by several completions of one problem: mean@k, best@k and pass@k. Pure.

A completion passes if its reward is at least 1, which is what rewards for right answers give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_workload.algorithm.advantage import as_groups, mean

PASSES = 1.0


def best_at(values: Sequence[float], k: int) -> float:
    """Return the mean, over problems, of the best of k values; NaN ones do not count, nor problems without others.

    Values of a problem are adjacent.
    """
    groups = [[value for value in group if not math.isnan(value)] for group in as_groups(values, k)]
    return mean([max(group) for group in groups if group])


def pass_at(values: Sequence[float], k: int, is_there: Sequence[bool]) -> dict[int, float]:
    """Return for 1, 2, 4, ... and k the probability that at least one of so many completions of a problem passes.

    It is the unbiased estimate from all completions that are there (arXiv:2107.03374, equation 1), of the problems that
    have as many. NaN values do not pass; problems that have no other value do not count.
    """
    pairs = [*zip(values, is_there, strict=True)]
    found = [[value for value, there in pairs[at : at + k] if there] for at in range(0, len(pairs), k)]
    counts = [
        (len(group), sum(value >= PASSES for value in group)) for group in found if not all(map(math.isnan, group))
    ]
    sizes = sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
    return {
        size: mean([1 - math.comb(own - passed, size) / math.comb(own, size) for own, passed in counts if own >= size])
        for size in sizes
    }
