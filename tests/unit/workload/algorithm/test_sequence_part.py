"""The parts of a micro-batch that ranks are fed: together they are all of it, and each has something to compute."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.micro_batch import filler, micro_batch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.sequence_part import SequencePart
from support.trainer.samples import make_sample


def batch_of(lengths, shared=()):
    """Return sequences of these numbers of prompt and completion tokens, with the experts of each token."""
    samples = [make_sample((1,) * prompt, range(3, 3 + tokens)) for prompt, tokens in lengths]
    batch = micro_batch(samples, shared)
    return replace(batch, experts_NLX=torch.arange(batch.num_tokens).reshape(-1, 1, 1))


def parts_of(batch, size):
    return [SequencePart.of(batch, place, size) for place in range(size)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), size=st.integers(2, 5)
)
def test_parts_are_all_tokens_in_order_and_each_completion_token_is_in_one(lengths, size):
    batch = batch_of(lengths)
    parts = parts_of(batch, size)
    inputs = [part.model_inputs() for part in parts]
    for name in ("input_ids", "position_ids"):
        own = [one[name] for one in inputs]
        assert torch.cat(own, dim=1)[:, : batch.num_tokens].equal(batch.model_inputs()[name])
        sizes = [one.size(1) for one in own]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
    assert torch.cat([part.own_P for part in parts]).sort().values.equal(torch.arange(len(batch.places_K)))
    for part in parts:
        assert len(part.places_P) >= 1, "each rank has a backward pass"
        assert part.places_P.max() < part.own.stop - part.own.start
        if len(part.own_P):
            assert (part.places_P + part.own.start).equal(batch.places_K[part.own_P])
            assert part.targets_P.equal(batch.targets_K[part.own_P])
        assert part.model_inputs()["cu_seq_lens_q"][: len(batch.cu_seq_lens)].equal(batch.cu_seq_lens)
    assert torch.cat([part.experts for part in parts])[: batch.num_tokens].equal(batch.experts_NLX)


def test_a_micro_batch_with_fewer_tokens_than_ranks_gets_a_further_sequence():
    batch = filler()
    *_, last = parts_of(batch, 5)
    inputs = last.model_inputs()
    assert inputs["input_ids"].shape == (1, 1)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert inputs["max_length_q"] == 3
    assert inputs["position_ids"].tolist() == [[2]]


def test_completions_that_share_a_prompt_are_divided_where_their_tokens_are_fed():
    batch = batch_of([(6, 3), (6, 2)], shared=(0, 6))
    first, second = parts_of(batch, 2)
    assert (batch.num_tokens, first.own, second.own) == (11, slice(0, 6), slice(6, 11))
    # The first token of both completions comes from the prompt's last one.
    assert (first.own_P.tolist(), second.own_P.tolist()) == ([0, 3], [1, 2, 4])


def test_penalties_of_a_part_are_those_of_its_rows():
    batch = batch_of([(4, 6), (3, 5)])
    penalised = Penalties(repetition=1.3, frequency=0.2).on(batch)
    logits = torch.randn(len(batch.places_K), 12)
    whole = logits.clone()
    penalised.apply(whole, 0, 0)
    for part in parts_of(batch, 3):
        own = logits[part.own_P].clone()
        penalised.among(part.own_P).apply(own, 0, 0)
        assert own.equal(whole[part.own_P])
