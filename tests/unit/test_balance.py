import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.balance import TOLERANCE, Fact, Piece, micro_batches, plan, spread
from grpo_workload.config import TrainingConfig
from grpo_workload.loss import LossScale
from grpo_workload.types import Completion, Prompt, Sample


def fact(tokens=4, *, prompt_tokens=2, is_truncated=False, reward=1.0, advantage=0.5):
    return Fact(prompt_tokens, tokens, is_truncated, reward, advantage)


def make_sample(fact):
    finish = "length" if fact.is_truncated else "stop"
    answer = Completion(token_ids=(7,) * fact.tokens, logprobs=(0.0,) * fact.tokens, text="", finish_reason=finish, weight_version=0)
    prompt = Prompt(index=0, text="", token_ids=(1,) * fact.prompt_tokens)
    return Sample(prompt=prompt, completion=answer, reward=fact.reward, advantage=fact.advantage)


ranks = st.lists(st.lists(st.integers(1, 1000), max_size=12), min_size=1, max_size=8)


@given(tokens=ranks)
def test_every_piece_stays_in_the_world_and_no_rank_is_worse_off_than_the_worst_was(tokens):
    shares = [[Piece(rank, place, count) for place, count in enumerate(own)] for rank, own in enumerate(tokens)]
    after = spread(shares)
    assert sorted(piece for share in after for piece in share) == sorted(piece for share in shares for piece in share)
    loads = [sum(piece.tokens for piece in share) for share in after]
    assert max(loads) <= max(sum(own) for own in tokens)
    # Where ranks still differ, no piece of the richest is small enough to help the poorest.
    rich = after[loads.index(max(loads))]
    gap = max(loads) - min(loads)
    assert gap <= TOLERANCE * sum(loads) / len(loads) or all(piece.tokens >= gap for piece in rich)


def test_equal_ranks_keep_what_they_have():
    shares = [[Piece(0, 0, 100), Piece(0, 1, 300)], [Piece(1, 0, 399)]]
    assert spread(shares) == shares


@given(tokens=ranks, budget=st.integers(1, 1500))
def test_all_ranks_have_as_many_micro_batches(tokens, budget):
    training = TrainingConfig(max_tokens_per_micro_batch=budget)
    work = plan([[fact(count) for count in own] for own in tokens], training)
    for rank in range(len(tokens)):
        # A world in which nothing moved needs no collective.
        if all(piece.owner == owner for owner, bins in enumerate(work.bins) for pieces in bins for piece in pieces):
            batches = list(micro_batches(work, [make_sample(fact(count)) for count in tokens[rank]], rank))
            assert len(batches) == work.num_micro_batches
            assert sum(batch.num_tokens for batch in batches) == work.fed_tokens(rank)
            assert sum(batch.num_tokens for batch in batches if batch.mask_BC.any()) == sum(count + 2 for count in tokens[rank])


@pytest.mark.parametrize(
    ("left_out", "options", "num_tokens"),
    [
        (fact(advantage=0.0), {}, 8),  # in the loss, but without a gradient
        (fact(reward=math.nan), {}, 4),
        (fact(is_truncated=True), {"mask_truncated_completions": True}, 4),
    ],
)
def test_what_costs_nothing(left_out, options, num_tokens):
    work = plan([[fact(), left_out]], TrainingConfig(**options))
    assert work.bins == [[[Piece(0, 0, 6)]]]
    assert work.scale == LossScale(num_sequences=2, num_tokens=num_tokens)


def test_a_divergence_pulls_at_samples_of_advantage_0_too():
    assert len(plan([[fact(advantage=0.0)]], TrainingConfig(beta=0.1)).bins[0]) == 1


def test_a_step_without_anything_to_learn_is_a_filler():
    training = TrainingConfig()
    work = plan([[fact(advantage=0.0)], []], training)
    (batch,) = micro_batches(work, [], 1)
    assert not batch.mask_BC.any()
