"""Prompts are shared evenly among ranks, packing respects its limits, and micro-batches have the documented layout."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.micro_batch import filler, micro_batch, pack, shard
from grpo_workload.algorithm.samples import Completion, Prompt, Sample


def make_sample(prompt=(1, 2), completion=(3, 4), *, advantage=0.5):
    logprobs = tuple(-0.25 * token for token in completion)
    answer = Completion(token_ids=tuple(completion), logprobs=logprobs, text="", finish_reason="stop", weight_version=0)
    return Sample(
        prompt=Prompt(index=0, text="", token_ids=tuple(prompt)), completion=answer, reward=1.0, advantage=advantage
    )


@given(num_prompts=st.integers(1, 200), world_size=st.integers(1, 40))
def test_shards_cover_every_prompt_once_in_even_shares(num_prompts, world_size):
    shares = [shard(num_prompts, world_size, rank) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(num_prompts))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


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


def test_layout_of_a_micro_batch():
    batch = micro_batch([make_sample((1,), (5, 6, 7), advantage=2.0), make_sample((1, 2, 3), (4,), advantage=-1.0)])
    assert batch.input_ids_1N.tolist() == [[1, 5, 6, 7, 1, 2, 3, 4]]
    assert batch.position_ids_1N.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.cu_seq_lens.tolist() == [0, 4, 8]
    assert (batch.max_length, batch.num_tokens) == (4, 8)
    assert batch.places_K.tolist() == [0, 1, 2, 6]
    assert batch.targets_K.tolist() == [5, 6, 7, 4]
    assert batch.mask_BC.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.sampling_logprobs_BC.tolist() == [[-1.25, -1.5, -1.75], [-1.0, 0.0, 0.0]]
    assert batch.advantages_B.tolist() == [2.0, -1.0]
    assert batch.rows(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 3], [4, 0, 0]]


def routed(sample, experts):
    completion = replace(sample.completion, routed_experts=np.array(experts, np.uint8))
    return replace(sample, completion=completion)


def test_experts_are_at_their_tokens_and_unknown_at_the_last_token_and_where_none_came():
    samples = [make_sample((1,), (5, 6)), make_sample((1, 2), (4,)), make_sample((9,), (7,))]
    samples[0] = routed(samples[0], [[[0, 255]], [[1, 2]], [[8, 8]]])  # vLLM may know the last token's, too
    samples[2] = routed(samples[2], [[[3, 4]]])
    batch = micro_batch(samples)
    nothing = [[-1, -1]]
    assert batch.experts_NLX.tolist() == [[[0, 255]], [[1, 2]], *[nothing] * 4, [[3, 4]], nothing]
    assert [half.experts_NLX.tolist() for half in batch.halves()] == [
        batch.experts_NLX[:3].tolist(),
        batch.experts_NLX[3:].tolist(),
    ]
    assert micro_batch([make_sample()]).experts_NLX is None


def test_rows_is_differentiable():
    batch = micro_batch([make_sample((1,), (5, 6, 7)), make_sample((1, 2, 3), (4,))])
    values = torch.zeros(4, requires_grad=True)
    (batch.rows(values) * torch.tensor([[1.0, 2, 3], [4, 5, 6]])).sum().backward()
    assert values.grad.tolist() == [1, 2, 3, 4]


def test_a_filler_is_two_tokens_outside_the_loss():
    batch = filler()
    assert batch.num_tokens == 2
    assert not batch.mask_BC.any()
    assert batch.rows(torch.zeros(1)).shape == (1, 1)


def test_to_moves_every_tensor():
    moved = micro_batch([make_sample()]).to("meta")
    assert moved.input_ids_1N.device == moved.mask_BC.device == torch.device("meta")
    assert moved.max_length == 4
