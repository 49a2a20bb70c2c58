"""Asserts that the reference model computes in halves what does not fit into memory at once.

On a GPU that is really full: tests/gpu/test_out_of_memory.py.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention
from grpo_workload.policy.step.reference import Reference

attention.register()
LENGTHS = [(3, 9), (6, 1), (1, 5), (2, 2), (4, 7)]


def batch():
    samples = []
    for index, (prompt, completion) in enumerate(LENGTHS):
        ids = tuple((7 * index + place) % 60 for place in range(prompt + completion))
        answer = Completion(
            token_ids=ids[prompt:], logprobs=(-0.5,) * completion, text="", finish_reason="stop", weight_version=0
        )
        samples.append(
            Sample(
                prompt=Prompt(index=0, text="", token_ids=ids[:prompt]), completion=answer, reward=1, advantage=index
            )
        )
    return micro_batch(samples)


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="varlen").eval()


def limit(model, tokens):
    """Let passes over more tokens run out of memory; return the numbers of tokens of all passes."""
    passes = []

    def count(_module, inputs, _):
        passes.append(inputs[0].numel())
        if passes[-1] > tokens:
            raise torch.OutOfMemoryError("full")

    model.get_input_embeddings().register_forward_hook(count)
    return passes


def test_halves_give_the_same_log_probabilities(model):
    whole = Reference(model, LogprobHead(model)).logprobs(batch(), 0.7)
    passes = limit(model, 19)
    in_halves = Reference(model, LogprobHead(model)).logprobs(batch(), 0.7)
    assert passes == [40, 19, 21, 6, 15]
    torch.testing.assert_close(in_halves, whole)


@pytest.mark.parametrize(("is_partitioned", "tokens"), [(True, 30), (False, 5)], ids=["collective", "one sequence"])
def test_what_cannot_be_halved_runs_out_of_memory(model, is_partitioned, tokens):
    passes = limit(model, tokens)
    reference = Reference(model, LogprobHead(model), is_partitioned=is_partitioned)
    with pytest.raises(torch.OutOfMemoryError):
        reference.logprobs(batch(), 1.0)
    assert len(passes) == (1 if is_partitioned else 3)


def test_halves_hold_every_value_once():
    whole = batch()
    first, second = whole.halves()
    assert (first.num_sequences, second.num_sequences) == (2, 3)
    assert torch.equal(torch.cat([first.input_ids_1N, second.input_ids_1N], 1), whole.input_ids_1N)
    assert torch.equal(torch.cat([first.advantages_B, second.advantages_B]), whole.advantages_B)
    assert torch.equal(second.cu_seq_lens, torch.tensor([0, 6, 10, 21], dtype=torch.int32))
    assert (first.max_length, second.max_length) == (12, 11)
