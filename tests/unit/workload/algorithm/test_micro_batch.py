"""Micro-batches have the documented layout; one with shared prompts holds the same sequences, and each prompt once."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.micro_batch import filler, micro_batch
from grpo_workload.algorithm.samples import Episode, Fork, PromptImages
from support.trainer.samples import make_sample as sample_of


def make_sample(prompt=(1, 2), completion=(3, 4), **fields):
    logprobs = tuple(-0.25 * token for token in completion)
    return sample_of(prompt, completion, logprobs=logprobs, **fields)


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


def in_episode(sample, *context, **values):
    completion = replace(sample.completion, episode=Episode(context=context, **values))
    return replace(sample, completion=completion)


def test_the_model_reads_the_context_of_an_episode_and_nothing_else_has_a_place_for_it():
    twice = in_episode(make_sample((1,), (5, 90, 91, 6, 7, 92, 8)), (1, 3), (5, 6))
    ends_in_context = in_episode(make_sample((1, 2), (5, 93), advantage=-1.0), (1, 2), prompt_ids=(1, 2, 3))
    assert (twice.completion.num_own, ends_in_context.completion.num_own) == (4, 1)
    assert not twice.completion.is_lost
    assert in_episode(make_sample((1,), (5,)), lost="it is gone").completion.is_lost
    batch = micro_batch([twice, ends_in_context])
    assert batch.input_ids_1N.tolist() == [[1, 5, 90, 91, 6, 7, 92, 8, 1, 2, 3, 5, 93]]
    assert batch.cu_seq_lens.tolist() == [0, 8, 13]
    assert batch.places_K.tolist() == [0, 3, 4, 6, 10], "each is before its token"
    assert batch.targets_K.tolist() == [5, 6, 7, 8, 5]
    assert batch.mask_BC.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.sampling_logprobs_BC.tolist() == [[-1.25, -1.5, -1.75, -2.0], [-1.25, 0, 0, 0]]
    last = batch.halves()[1]
    assert (last.places_K.tolist(), last.targets_K.tolist()) == ([2], [5])


def test_sequences_of_one_episode_know_how_many_tokens_the_model_sampled_in_all_of_them():
    fork = Fork(prompt_ids=(9,), token_ids=(5, 6, 90, 7), logprobs=(0, 0, 0, -2.0), context=((0, 2), (2, 3)))
    forked = in_episode(make_sample((1,), (5, 90, 6)), (1, 2), forks=(fork,))
    assert forked.completion.num_own == 3
    assert forked.completion.num_read(forked.prompt) == (4, 5)
    assert [*forked.completion.all_logprobs] == [*forked.completion.logprobs, *fork.logprobs]
    batch = micro_batch([forked.sequence(1), forked.bare().sequence(0), make_sample((2,), (8,))])
    assert batch.input_ids_1N.tolist() == [[9, 5, 6, 90, 7, 1, 5, 90, 6, 2, 8]]
    assert batch.targets_K.tolist() == [7, 5, 6, 8]
    assert batch.sampling_logprobs_BC.tolist() == [[-2.0, 0], [-1.25, -1.5], [-2.0, 0]]
    assert batch.tokens_B.tolist() == [3, 3, 1]
    assert [half.tokens_B.tolist() for half in batch.halves()] == [[3], [3, 1]]
    assert micro_batch([make_sample().sequence(0)]).tokens_B is None


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


def test_a_filler_is_two_tokens_outside_the_loss():
    batch = filler()
    assert batch.num_tokens == 2
    assert not batch.mask_BC.any()
    assert batch.rows(torch.zeros(1)).shape == (1, 1)


def test_to_moves_every_tensor():
    moved = micro_batch([make_sample()]).to("meta")
    assert moved.input_ids_1N.device == moved.mask_BC.device == torch.device("meta")
    assert moved.max_length == 4


def test_what_goes_to_another_rank_has_all_that_the_loss_needs_and_nothing_else():
    sample = make_sample()
    images = PromptImages(images=("red",), engine_ids=(1,), token_id=1, inputs={"pixel_values": np.ones(2)})
    prompt = replace(sample.prompt, text="Which?", columns={"answer": "4"}, ending="<think>", images=images)
    bare = replace(sample, prompt=prompt, extra={"r": {"note": "x"}}).bare()
    assert bare == replace(sample, prompt=replace(sample.prompt, images=replace(images, images=())))
    assert sample.bare() == sample
    episode = Episode(messages=({},), context=((1, 2),), prompt_ids=(1,), observation="o", state=b"s")
    acted = replace(sample, completion=replace(sample.completion, episode=episode))
    assert acted.bare().completion.episode == Episode(context=((1, 2),), prompt_ids=(1,))


def test_halves_hold_the_rows_and_tokens_of_the_whole():
    samples = [make_sample((1, 2), (3, 4)), make_sample((5,), (6, 7, 8)), make_sample((9, 10), (11,))]
    whole, (first, second) = micro_batch(samples), micro_batch(samples).halves()
    assert torch.cat([first.input_ids_1N, second.input_ids_1N], dim=1).equal(whole.input_ids_1N)
    for half, own in ((first, samples[:1]), (second, samples[1:])):
        alone = micro_batch(own)
        for name in ("input_ids_1N", "cu_seq_lens", "places_K", "targets_K", "advantages_B"):
            assert getattr(half, name).equal(getattr(alone, name)), name
        assert (half.num_sequences, half.max_length) == (alone.num_sequences, alone.max_length)


TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=9)
GROUPS = st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=4)), min_size=1, max_size=4)


def packed(groups, *, has_context=False):
    def sample(prompt, completion):
        episode = Episode(context=((1, 2),)) if has_context and len(completion) > 2 else None
        return make_sample(prompt, completion, episode=episode, advantage=float(len(completion)))

    samples = [sample(prompt, one) for prompt, own in groups for one in own]
    shared = [len(prompt) if number else 0 for prompt, own in groups for number in range(len(own))]
    return micro_batch(samples), micro_batch(samples, shared)


def tensors(batch):
    return {name: getattr(batch, name) for name in type(batch).__slots__ if torch.is_tensor(getattr(batch, name))}


@given(groups=GROUPS, has_context=st.booleans())
def test_taken_apart_it_is_the_layout_of_single_sequences(groups, has_context):
    apart, together = packed(groups, has_context=has_context)
    found = together.apart()
    assert found.max_length == apart.max_length
    assert found.keys is None
    for name, tensor in tensors(apart).items():
        assert tensor.equal(getattr(found, name)), name
        assert tensor.dtype == getattr(found, name).dtype, name


@given(groups=GROUPS)
def test_each_prompt_is_there_once_and_each_token_of_a_completion_follows_the_same_tokens(groups):
    apart, together = packed(groups)
    assert together.num_tokens == sum(len(prompt) + sum(map(len, own)) for prompt, own in groups)
    assert together.num_sequences == apart.num_sequences
    assert together.max_length == int(together.cu_seq_lens.diff().max())
    assert together.input_ids_1N[0, together.places_K].equal(apart.input_ids_1N[0, apart.places_K])
    assert together.position_ids_1N[0, together.places_K].equal(apart.position_ids_1N[0, apart.places_K])
    if together.keys is None:
        assert all(len(own) == 1 for _, own in groups)
        return
    places_N = torch.arange(together.num_tokens)
    assert together.keys.places_M[together.keys.own_N].equal(places_N), "a token's own key is among the keys"
    # The kernel aligns the last query of a sequence with its last key.
    for queries, ends, starts in zip(
        together.cu_seq_lens.diff().tolist(),
        together.keys.bounds[1:].tolist(),
        together.cu_seq_lens.tolist(),
        strict=False,
    ):
        assert together.keys.own_N[starts : starts + queries].tolist() == list(range(ends - queries, ends))


def test_layout_of_a_group_behind_a_single_sequence():
    _, batch = packed([((9,), [(8,)]), ((1, 2), [(3, 4), (5,)])])
    assert batch.input_ids_1N.tolist() == [[9, 8, 1, 2, 3, 4, 5]]
    assert batch.position_ids_1N.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert batch.cu_seq_lens.tolist() == [0, 2, 6, 7]
    assert batch.places_K.tolist() == [0, 3, 4, 3], "both first tokens come after the prompt"
    assert batch.targets_K.tolist() == [8, 3, 4, 5]
    assert batch.keys.places_M.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 6]
    assert batch.keys.bounds.tolist() == [0, 2, 6, 9]
    assert (batch.max_length, batch.keys.longest) == (4, 4)
    assert batch.model_inputs()["shared_keys"] is batch.keys
    assert batch.to("meta").keys.places_M.is_meta


def test_halves_have_the_prompts_of_their_sequences():
    apart, together = packed([((1, 2), [(3, 4), (5,), (6, 7, 8)])])
    for half, expected in zip(together.halves(), apart.halves(), strict=True):
        assert half.input_ids_1N.equal(expected.input_ids_1N)
        assert half.places_K.equal(expected.places_K)
