"""mean@k, best@k and pass@k of several completions a problem, next to their definition by counting."""

import itertools
import math

import pytest

from grpo_workload.algorithm.best_of import best_at, pass_at


def test_best_at_is_the_mean_of_each_problems_best():
    assert best_at([0.0, 1.0, 0.25, 0.5], 2) == 0.75
    assert best_at([math.nan, 1.0, math.nan, math.nan], 2) == 1.0, "what has no value does not count"
    assert math.isnan(best_at([math.nan, math.nan], 2))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_pass_at_is_the_share_of_all_choices_of_so_many_completions_with_one_that_passes(k):
    values = [float((problem * 7 + number * 5) % 4 == 0) for problem in range(6) for number in range(k)]
    found = pass_at(values, k, [True] * len(values))
    assert list(found) == sorted({size for size in (1, 2, 4, 8, k) if size <= k})
    for size, share in found.items():
        chosen = [
            any(choice)
            for start in range(0, 6 * k, k)
            for choice in itertools.combinations(values[start : start + k], size)
        ]
        assert share == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_counts_full_marks_alone():
    assert pass_at([0.99, 2.0, math.nan, 0.0, math.nan, math.nan], 2, [True] * 6) == {1: 0.25, 2: 0.5}


def test_lost_episodes_do_not_pass_and_do_not_fail():
    """As `best_at`: the environment failed, not the model. Of how many pass, only problems that have as many tell."""
    values = [1.0, math.nan, 1.0, 0.0, math.nan, math.nan]
    found = pass_at(values, 2, [True, False, True, True, False, False])
    assert found == {1: 0.75, 2: 1.0}
    assert math.isnan(pass_at(values[:2], 2, [True, False])[2])
