"""Passes that measure memory never take more than there is, and what is chosen from them fits and uses most of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.token_budget import MOST, NUM_PASSES, Pass, expected, largest, next_pass

MIB = 2**20


def choose(peak, room, most=MOST):
    """Measure passes whose memory is `peak(tokens)`; return them, and the number of tokens that is chosen."""
    passes = []
    for _ in range(NUM_PASSES):
        if tokens := next_pass(passes, room, most):
            passes.append(Pass(tokens, peak(tokens)))
    return passes, min(most, largest(passes, room))


def peaks(*lines):
    """The largest of several lines (constant bytes, bytes for each token)."""
    return lambda tokens: max(constant + each * tokens for constant, each in lines)


lines = st.lists(st.tuples(st.integers(0, 4096 * MIB), st.integers(1024, 2 * MIB)), min_size=1, max_size=4)


@given(lines=lines, room=st.integers(64 * MIB, 512 * 1024 * MIB), most=st.integers(1, MOST))
def test_no_pass_after_the_first_takes_more_than_there_is(lines, room, most):
    peak = peaks(*lines)
    passes, chosen = choose(peak, room, most)
    assert all(one.memory <= room for one in passes[1:])
    assert [one.tokens for one in passes] == sorted({one.tokens for one in passes})
    assert 1 <= chosen <= most


@pytest.mark.parametrize("room", [1, 3, 10, 25])
def test_what_is_chosen_fills_the_memory(room):
    # As of 7B: the output layer's gradient and its part for each token, or those of a layer that is recomputed.
    peak = peaks((100 * MIB, 300_000), (0, 320_000))
    most = next(tokens for tokens in range(MOST, 0, -1) if peak(tokens) <= room * 1024 * MIB or tokens == 1)
    _, chosen = choose(peak, int(room * 1024 * MIB))
    assert 0.9 * most <= chosen <= 1.02 * most


def test_a_constant_part_does_not_make_micro_batches_small():
    passes, chosen = choose(peaks((2048 * MIB, 300_000)), 3072 * MIB)
    assert passes[-1].tokens < 2000
    assert chosen == pytest.approx(1024 * MIB / 300_000, rel=0.1)


def test_less_memory_than_the_first_pass_took_gives_less_than_its_tokens():
    assert choose(peaks((0, MIB)), 512 * MIB) == ([Pass(1024, 1024 * MIB)], 512)
    assert choose(peaks((0, MIB)), -MIB)[1] == 1


def test_a_small_step_is_measured_whole():
    assert choose(peaks((0, MIB)), 2**40, most=900) == ([Pass(900, 900 * MIB)], 900)
    passes, chosen = choose(peaks((0, MIB)), 2**40, most=1100)
    assert ([one.tokens for one in passes], chosen) == ([1024, 1100], 1100)


def test_a_further_pass_has_at_least_a_quarter_more_tokens():
    assert next_pass([Pass(1024, MIB)], 2 * MIB, 1281) == 1281
    assert next_pass([Pass(1024, 1024)], 1280, MOST) == 1280
    assert next_pass([Pass(1024, 1024)], 1279, MOST) == 0


def test_what_is_chosen_is_at_most_twice_what_was_tried_and_memory_that_does_not_grow_tells_nothing():
    assert largest([Pass(1024, MIB)], 2**40) == 2048
    assert largest([Pass(1024, MIB), Pass(4096, MIB)], 2 * MIB) == 8192
    assert largest([Pass(1024, MIB), Pass(4096, MIB)], MIB // 2) == 2048


def test_what_a_longer_sequence_takes_follows_from_the_last_two_passes():
    assert expected([], 1000) == 0
    assert expected([Pass(1024, 1024 * MIB)], 4096) == 4096 * MIB
    passes, _ = choose(peaks((2048 * MIB, MIB)), 2**40)
    assert expected(passes, 200_000) == (2048 + 200_000) * MIB
