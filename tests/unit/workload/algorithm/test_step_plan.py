"""Ranks get even shares; only samples without a gradient are left out. Packing respects its limits, with few bins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import FILLER_TOKENS
from grpo_workload.algorithm.packing import pack
from grpo_workload.algorithm.pieces import COPY, SAVING, Piece, Unit
from grpo_workload.algorithm.step_plan import TOLERANCE, EpisodeFact, Fact, Plan, plan, spread


def fact(tokens=4, *, prompt_tokens=2, is_truncated=False, reward=1.0, advantage=0.5, has_logprobs=True):
    return Fact(prompt_tokens, tokens, is_truncated, reward, advantage, has_logprobs)


def single(*values):
    return Unit((Piece(*values),))


def group(prompt_tokens, *completions, number=0):
    facts = [fact(tokens, prompt_tokens=prompt_tokens) for tokens in completions]
    return [one._replace(prompt=(number, prompt_tokens)) for one in facts]


ranks = st.lists(st.lists(st.integers(1, 1000), max_size=12), min_size=1, max_size=8)


@given(tokens=ranks)
def test_spread_keeps_every_piece_and_does_not_raise_the_largest_load(tokens):
    shares = [[single(rank, place, count) for place, count in enumerate(own)] for rank, own in enumerate(tokens)]
    after = spread(shares)
    assert sorted(unit for share in after for unit in share) == sorted(unit for share in shares for unit in share)
    loads = [sum(unit.tokens for unit in share) for share in after]
    assert max(loads) <= max(sum(own) for own in tokens)
    # If ranks still differ, no piece of the fullest rank is small enough to help the emptiest.
    rich = after[loads.index(max(loads))]
    gap = max(loads) - min(loads)
    assert gap <= TOLERANCE * sum(loads) / len(loads) or all(unit.tokens >= gap for unit in rich)


def test_nearly_equal_ranks_keep_their_samples():
    shares = [[single(0, 0, 100), single(0, 1, 300)], [single(1, 0, 399)]]
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
    assert [[*map(tuple, own)] for own in pieces] == [[(0, 0, 10, 0, 0), (0, 1, 6, 0, 0)], [(0, 0, 12, 1, 0)]]
    gone = forked._replace(advantage=0.0), forked._replace(has_logprobs=False)
    assert plan([gone], TrainingConfig()).bins == [[]]


def test_with_a_kl_term_samples_of_advantage_0_are_trained_on():
    for other_terms in ({"beta": 0.1}, {"loss": "my_losses:ppo"}):
        assert len(plan([[fact(advantage=0.0)]], TrainingConfig(**other_terms)).bins[0]) == 1


@pytest.mark.parametrize(("options", "sizes"), [({"per_device_train_batch_size": 2}, [2, 2, 1]), ({}, [5])])
def test_a_micro_batch_has_as_many_sequences_as_the_job_says(options, sizes):
    assert [len(one) for one in plan([[fact()] * 5], TrainingConfig(**options)).bins[0]] == sizes
    assert plan([[fact()], []], TrainingConfig(**options)).bins == [[[Piece(0, 0, 6)]], []]


def test_ranks_that_share_sequences_train_on_the_same_samples_and_half_of_the_tokens():
    facts = [[fact(5)], [fact(3)], [fact(8)], []]
    shared = plan(facts, TrainingConfig(), sequence=2)
    assert shared.bins == [[[Piece(0, 0, 7), Piece(1, 0, 5)]], [[Piece(2, 0, 10)]]]
    assert [shared.trained_tokens(rank) for rank in range(4)] == [6, 6, 5, 5]
    filled = Plan(scale=shared.scale, bins=[*shared.bins[:1], []], sequence=2)
    assert [filled.fed_tokens(rank) for rank in range(4)] == [6, 6, 1, 1]


def test_ranks_with_fewer_micro_batches_feed_fillers():
    two = [[Piece(0, 0, 6)], [Piece(0, 1, 5)]]
    uneven = Plan(scale=LossScale(num_sequences=2, num_tokens=11), bins=[two, []])
    assert [uneven.fed_tokens(rank) for rank in (0, 1)] == [11, 2 * FILLER_TOKENS]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 400), st.lists(st.integers(1, 100), max_size=6)), max_size=8),
    num_ranks=st.integers(1, 3),
    budget=st.integers(1, 2000),
    most=st.sampled_from([None, 1, 3]),
)
def test_groups_share_prompts_and_no_sequence_is_lost_or_alone_in_want_of_its_prompt(prompts, num_ranks, budget, most):
    facts = [[] for _ in range(num_ranks)]
    for number, (prompt_tokens, completions) in enumerate(prompts):
        facts[number % num_ranks] += group(prompt_tokens, *completions, number=number)
    training = TrainingConfig(max_tokens_per_micro_batch=budget, per_device_train_batch_size=most)
    work, apart = plan(facts, training, shares_prompts=True), plan(facts, training)
    whole = [piece._replace(shared=0) for own in work.bins for bin_ in own for piece in bin_]
    assert sorted(whole) == sorted(piece for own in apart.bins for bin_ in own for piece in bin_)
    assert work.scale == apart.scale
    for bin_ in (bin_ for own in work.bins for bin_ in own):
        size, leader = 0, None
        for piece in bin_:
            size += piece.fed + COPY * piece.shared
            if not piece.shared:
                leader = piece
                continue
            number, prompt_tokens = facts[piece.owner][piece.place].prompt
            assert leader.owner == piece.owner
            assert (number, piece.shared) == facts[leader.owner][leader.place].prompt
            assert piece.shared == prompt_tokens
        assert len(bin_) <= (most or len(bin_))
        assert size <= max(budget, max(piece.tokens for piece in bin_)) + 1
    fed, all_tokens = (sum(one.trained_tokens(rank) for rank in range(num_ranks)) for one in (work, apart))
    assert fed <= all_tokens
    if most == 1:
        assert work == apart


def test_a_prompt_is_shared_where_that_saves_enough_tokens():
    short, long = group(1, 9, 9, 9), group(100, 9, 9, 9, number=1)
    work = plan([[*short, *long]], TrainingConfig(), shares_prompts=True)
    shared = [Piece(0, 3 + number, 109, shared=100 if number else 0) for number in range(3)]
    assert work.bins == [[[*shared, *(Piece(0, number, 10) for number in range(3))]]]
    assert SAVING * (1 + 3 * 9) > 3 * 10
    assert work.trained_tokens(0) == 100 + 3 * 9 + 3 * 10


def test_a_group_that_is_too_long_for_a_micro_batch_is_cut_with_its_prompt_in_each_part():
    budget = 100 + 3 * 9 + 26
    work = plan([group(100, *[9] * 5)], TrainingConfig(max_tokens_per_micro_batch=budget), shares_prompts=True)
    assert [[piece.shared for piece in bin_] for bin_ in work.bins[0]] == [[0, 100, 100], [0, 100]]


def test_a_group_moves_whole_or_by_halves_where_ranks_would_wait():
    whole = plan([group(50, 5, 5) + group(50, 5, 5, number=1), []], TrainingConfig(), shares_prompts=True)
    assert [whole.trained_tokens(rank) for rank in (0, 1)] == [60, 60]
    halves = plan([group(50, *[40] * 4), []], TrainingConfig(), shares_prompts=True)
    assert [halves.trained_tokens(rank) for rank in (0, 1)] == [130, 130]
    apart = plan([group(50, 5, 5), []], TrainingConfig(), shares_prompts=True)
    assert [apart.trained_tokens(rank) for rank in (0, 1)] == [55, 55]


def test_forks_of_an_episode_keep_their_prompts_to_themselves():
    forked = fact(tokens=9, prompt_tokens=113)._replace(
        sequences=(110, 12), episode=EpisodeFact(sequences=2), prompt=(0, 100)
    )
    (bins,) = plan([[forked, *group(100, 8)]], TrainingConfig(), shares_prompts=True).bins
    assert bins == [[Piece(0, 0, 110), Piece(0, 1, 108, shared=100), Piece(0, 0, 12, 1)]]


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
