"""A layout with shared prompts holds exactly the sequences that it was made of, and each prompt once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Episode
from support.trainer.samples import make_sample

TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=9)
GROUPS = st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=4)), min_size=1, max_size=4)


def packed(groups, *, has_context=False):
    def sample(prompt, completion):
        episode = Episode(context=((1, 2),)) if has_context and len(completion) > 2 else None
        logprobs = tuple(-0.25 * token for token in completion)
        return make_sample(prompt, completion, logprobs=logprobs, episode=episode, advantage=float(len(completion)))

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
