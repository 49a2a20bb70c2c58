"""Asserts that the reference model computes in halves what does not fit into memory at once.

On a GPU that is really full: tests/gpu/test_out_of_memory.py.
"""

import pytest
import torch

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention
from grpo_workload.policy.step.reference import Reference
from support.families import make_model
from support.trainer.samples import random_samples

attention.register()


def batch():
    return micro_batch(random_samples((3, 9), (6, 1), (1, 5), (2, 2), (4, 7)))


@pytest.fixture
def model():
    made = make_model("llama").eval()
    made.set_attn_implementation(attention.VARLEN)
    return made


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
