import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.batching import local_scale, micro_batches, num_micro_batches, shard
from grpo_workload.loss import LossScale
from grpo_workload.types import Completion, Prompt, Sample

PAD = 99


def make_sample(prompt=(1, 2), completion=(3, 4), *, reward=1.0, advantage=0.5, finish_reason="stop"):
    return Sample(
        prompt=Prompt(index=0, text="", token_ids=tuple(prompt)),
        completion=Completion(
            token_ids=tuple(completion),
            logprobs=tuple(-0.25 * token for token in completion),
            text="",
            finish_reason=finish_reason,
            weight_version=0,
        ),
        reward=reward,
        advantage=advantage,
    )


@given(num_prompts=st.integers(1, 200), world_size=st.integers(1, 40))
def test_shards_cover_every_prompt_once_and_evenly(num_prompts, world_size):
    shares = [shard(num_prompts, world_size, rank, allow_empty=True) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(num_prompts))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_rank_without_prompts_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"5 prompts over 8 ranks leave ranks 5-7 without work; use at least 8"):
        shard(5, 8, 0)


@given(num_prompts=st.integers(1, 40), world_size=st.integers(1, 8), generations=st.integers(2, 8), size=st.integers(1, 9))
def test_every_rank_has_the_same_number_of_micro_batches_and_each_sample_once(num_prompts, world_size, generations, size):
    count = num_micro_batches(num_prompts, generations, world_size, size)
    seen = 0
    for rank in range(world_size):
        samples = [make_sample() for _ in shard(num_prompts, world_size, rank, allow_empty=True) for _ in range(generations)]
        batches = micro_batches(samples, size, PAD, num_micro_batches=count)
        assert len(batches) == count
        assert all(batch.num_sequences <= size for batch in batches)
        seen += local_scale(batches).num_sequences
    assert seen == num_prompts * generations


def test_layout():
    samples = [make_sample((1,), (5, 6, 7), advantage=2.0), make_sample((1, 2, 3), (4,), advantage=-1.0)]
    (batch,) = micro_batches(samples, 2, PAD, num_micro_batches=1)
    assert batch.input_ids_BL.tolist() == [[PAD, PAD, 1, 5, 6, 7], [1, 2, 3, 4, PAD, PAD]]
    assert batch.attention_mask_BL.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert batch.position_ids_BL.tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 3, 3]]
    assert batch.completion_ids_BC.tolist() == [[5, 6, 7], [4, PAD, PAD]]
    assert batch.mask_BC.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.sampling_logprobs_BC.tolist() == [[-1.25, -1.5, -1.75], [-1.0, 0.0, 0.0]]
    assert batch.advantages_B.tolist() == [2.0, -1.0]


def test_samples_of_like_length_share_a_batch():
    samples = [make_sample(completion=range(length)) for length in (1, 9, 2, 8)]
    widths = [batch.completion_ids_BC.size(1) for batch in micro_batches(samples, 2, PAD, num_micro_batches=2)]
    assert widths == [9, 2]


def test_what_stays_out_of_the_loss():
    samples = [make_sample(reward=math.nan), make_sample(finish_reason="length"), make_sample()]
    (batch,) = micro_batches(samples, 3, PAD, num_micro_batches=1)
    assert batch.mask_BC.sum(dim=1).tolist() == [0, 2, 2]
    (batch,) = micro_batches(samples, 3, PAD, num_micro_batches=1, mask_truncated_completions=True)
    assert batch.mask_BC.sum(dim=1).tolist() == [0, 0, 2]
    assert local_scale([batch]) == LossScale(num_sequences=3, num_tokens=2)


def test_a_rank_without_samples_gets_fillers_that_a_model_can_run():
    batches = micro_batches([], 4, PAD, num_micro_batches=2)
    assert local_scale(batches) == LossScale(num_sequences=0, num_tokens=0)
    assert all(batch.attention_mask_BL.all() and batch.input_ids_BL.shape == (1, 2) for batch in batches)


def test_to_moves_every_tensor():
    (batch,) = micro_batches([make_sample()], 1, PAD, num_micro_batches=1)
    moved = batch.to("meta")
    assert moved.input_ids_BL.device == moved.mask_BC.device == torch.device("meta")
    assert moved.num_sequences == 1
