"""Packing respects its limits, and uses few bins."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.packing import pack


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60), max_tokens=st.integers(1, 60), max_sequences=st.integers(1, 9)
)
def test_bins_hold_each_sequence_once_and_respect_their_limits(lengths, max_tokens, max_sequences):
    bins = pack(lengths, max_tokens=max_tokens, max_sequences=max_sequences)
    assert sorted(index for one in bins for index in one) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in one) for one in bins]
    assert all(total <= max_tokens or len(one) == 1 for total, one in zip(sums, bins, strict=True))
    assert all(len(one) <= max_sequences for one in bins)
    assert sums == sorted(sums, reverse=True)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_number_of_bins_is_at_most_twice_the_minimum_plus_1(lengths):
    bins = pack(lengths, max_tokens=40, max_sequences=60)
    assert len(bins) <= 2 * sum(lengths) / 40 + 1


def test_long_sequences_are_placed_first_so_that_short_ones_fill_what_they_leave():
    assert pack([3, 3, 3, 7, 7, 7], max_tokens=10, max_sequences=6) == [[3, 0], [4, 1], [5, 2]]
