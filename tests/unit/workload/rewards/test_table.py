"""Weighted sums of rewards: a completion whose sum float32 cannot hold has none, and the reward to blame is named."""

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.advantage import group_advantages
from grpo_workload.rewards.table import LARGEST, RewardTable, tabulate


@pytest.mark.parametrize(
    ("weights", "row", "total", "blamed"),
    [
        ((1.0, 1.0), (1e38, 1.0), 1e38, None),
        ((1.0, 10.0), (1.0, 1e38), math.nan, "b"),
        ((1.0, 1.0), (2e38, 3e38), math.nan, "b"),
        ((1e300, 1.0), (1e300, None), math.nan, "a"),
        ((1e300, -1e300), (1e300, 1e300), math.nan, "a"),
    ],
)
def test_a_sum_that_is_too_large_is_left_out_and_blamed_on_its_largest_part(weights, row, total, blamed):
    table = tabulate(dict(zip("ab", weights, strict=True)), [[value] for value in row])
    assert table.totals == pytest.approx([total], nan_ok=True)
    assert table.overflows == [blamed]


def test_concat_keeps_the_order_of_ranks():
    one, two = tabulate({"a": 1.0}, [[1.0, 1e39]]), tabulate({"a": 1.0}, [[None]])
    joined = RewardTable.concat([one, two])
    assert joined.values == [[1.0, 1e39, None]]
    assert joined.overflows == [None, "a", None]


@given(
    rewards=st.lists(st.lists(st.floats(-LARGEST, LARGEST), min_size=4, max_size=4), min_size=1, max_size=3),
    scale=st.sampled_from(["group", "batch"]),
)
def test_advantages_of_rewards_of_any_size_are_finite(rewards, scale):
    assert all(map(math.isfinite, group_advantages([*chain(*rewards)], 4, scale)))


def test_huge_rewards_that_differ_give_the_advantages_of_small_ones():
    huge = group_advantages([1e38, 0.0, 1e38, 0.0], 4, "group")
    assert huge == pytest.approx(group_advantages([1e4, 0.0, 1e4, 0.0], 4, "group"))
