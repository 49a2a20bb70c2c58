"""Asserts that log-probabilities of the reference model are computed in halves on a GPU whose memory is really full."""

import torch

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.memory.memory_error import memory_error
from grpo_workload.policy.model import attention
from grpo_workload.policy.step.reference import Reference
from support.trainer.random_llama import make_random_llama
from support.trainer.samples import make_sample

LENGTH, COUNT = 500, 64


def what_is_said(reference, batch):
    """Run out of memory; return what the rank would say. The exception must not outlive this: it holds tensors."""
    try:
        reference._logprobs(batch, 1.0)
    except torch.OutOfMemoryError as error:
        return str(memory_error(batch, error))
    return "it fits"


def test_the_reference_model_goes_on_in_halves(tmp_path):
    attention.register()
    model = make_random_llama(tmp_path, "cuda", hidden=1024, layers=4, heads=8)
    model.set_attn_implementation("varlen")
    sample = make_sample((1,), [1 + place % 200 for place in range(LENGTH - 1)])
    batch = micro_batch([sample] * COUNT).to("cuda")
    reference = Reference(model, LogprobHead(model))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = reference.logprobs(batch, 1.0)
    needed = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.7 * needed) / total)
        assert "in 64 sequences" in what_is_said(reference, batch)
        in_halves = reference.logprobs(batch, 1.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(in_halves, whole, atol=0.05, rtol=0)
