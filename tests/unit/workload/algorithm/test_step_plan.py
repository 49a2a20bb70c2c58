"""Ranks get even shares; only samples without a gradient are left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import FILLER_TOKENS
from grpo_workload.algorithm.step_plan import TOLERANCE, EpisodeFact, Fact, Piece, Plan, plan, spread


def fact(tokens=4, *, prompt_tokens=2, is_truncated=False, reward=1.0, advantage=0.5, has_logprobs=True):
    return Fact(prompt_tokens, tokens, is_truncated, reward, advantage, has_logprobs)


ranks = st.lists(st.lists(st.integers(1, 1000), max_size=12), min_size=1, max_size=8)


@given(tokens=ranks)
def test_spread_keeps_every_piece_and_does_not_raise_the_largest_load(tokens):
    shares = [[Piece(rank, place, count) for place, count in enumerate(own)] for rank, own in enumerate(tokens)]
    after = spread(shares)
    assert sorted(piece for share in after for piece in share) == sorted(piece for share in shares for piece in share)
    loads = [sum(piece.tokens for piece in share) for share in after]
    assert max(loads) <= max(sum(own) for own in tokens)
    # If ranks still differ, no piece of the fullest rank is small enough to help the emptiest.
    rich = after[loads.index(max(loads))]
    gap = max(loads) - min(loads)
    assert gap <= TOLERANCE * sum(loads) / len(loads) or all(piece.tokens >= gap for piece in rich)


def test_nearly_equal_ranks_keep_their_samples():
    shares = [[Piece(0, 0, 100), Piece(0, 1, 300)], [Piece(1, 0, 399)]]
    assert spread(shares) == shares


@pytest.mark.parametrize(
    ("left_out", "options", "num_tokens"),
    [
        (fact(advantage=0.0), {}, 8),  # its tokens still count in the denominator
        (fact(has_logprobs=False), {"beta": 0.1}, 4),
        (fact(is_truncated=True), {"mask_truncated_completions": True}, 4),
    ],
)
def test_samples_without_a_gradient_are_left_out(left_out, options, num_tokens):
    work = plan([[fact(), left_out]], TrainingConfig(**options))
    assert work.bins == [[[Piece(0, 0, 6)]]]
    assert work.scale == LossScale(num_sequences=2, num_tokens=num_tokens)


def test_lost_episodes_are_in_no_denominator():
    lost = fact(tokens=0)._replace(episode=EpisodeFact(lost="process"))
    there = fact()._replace(episode=EpisodeFact(turns=3))
    work = plan([[there, lost, fact(advantage=0.0)]], TrainingConfig(beta=0.1))
    assert work.bins == [[[Piece(0, 0, 6), Piece(0, 2, 6)]]]
    assert work.scale == LossScale(num_sequences=2, num_tokens=8)
    assert plan([[lost], [lost]], TrainingConfig()).scale == LossScale(num_sequences=1, num_tokens=0)


def test_an_episode_of_several_sequences_counts_once_and_each_is_a_piece_of_its_own():
    forked = fact(tokens=9, prompt_tokens=13)._replace(sequences=(10, 12), episode=EpisodeFact(sequences=2))
    work = plan([[forked, fact()], []], TrainingConfig())
    assert work.scale == LossScale(num_sequences=2, num_tokens=13)
    pieces = [[piece for pieces in own for piece in pieces] for own in work.bins]
    assert [[*map(tuple, own)] for own in pieces] == [[(0, 0, 10, 0), (0, 1, 6, 0)], [(0, 0, 12, 1)]]
    gone = forked._replace(advantage=0.0), forked._replace(has_logprobs=False)
    assert plan([gone], TrainingConfig()).bins == [[]]


def test_with_a_kl_term_samples_of_advantage_0_are_trained_on():
    for other_terms in ({"beta": 0.1}, {"loss": "my_losses:ppo"}):
        assert len(plan([[fact(advantage=0.0)]], TrainingConfig(**other_terms)).bins[0]) == 1


@pytest.mark.parametrize(("options", "sizes"), [({"per_device_train_batch_size": 2}, [2, 2, 1]), ({}, [5])])
def test_a_micro_batch_has_as_many_sequences_as_the_job_says(options, sizes):
    assert [len(one) for one in plan([[fact()] * 5], TrainingConfig(**options)).bins[0]] == sizes
    assert plan([[fact()], []], TrainingConfig(**options)).bins == [[[Piece(0, 0, 6)]], []]


def test_ranks_with_fewer_micro_batches_feed_fillers():
    two = [[Piece(0, 0, 6)], [Piece(0, 1, 5)]]
    uneven = Plan(scale=LossScale(num_sequences=2, num_tokens=11), bins=[two, []])
    assert [uneven.fed_tokens(rank) for rank in (0, 1)] == [11, 2 * FILLER_TOKENS]
