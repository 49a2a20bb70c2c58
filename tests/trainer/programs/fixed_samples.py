"""Samples of steps that are the same on any number of ranks: programs import it after `environment.prepare`."""

import torch
import torch.distributed as dist

from grpo_workload.batching import local_scale, micro_batches, num_micro_batches, shard
from grpo_workload.collectives import add_scales
from grpo_workload.types import Completion, Prompt, Sample

NUM_PROMPTS, NUM_GENERATIONS = 5, 3  # over 3 ranks: shares of 2, 2 and 1 prompts
PAD = 2


def samples(step):
    random = torch.Generator().manual_seed(step)

    def tokens(low, high):
        length = int(torch.randint(low, high, (), generator=random))
        return tuple(torch.randint(3, 250, (length,), generator=random).tolist())

    for index in range(NUM_PROMPTS):
        prompt = Prompt(index=index, text="", token_ids=tokens(3, 12))
        for _ in range(NUM_GENERATIONS):
            ids = tokens(1, 9)
            completion = Completion(token_ids=ids, logprobs=(-5.0,) * len(ids), text="", finish_reason="stop", weight_version=0)
            yield Sample(prompt=prompt, completion=completion, reward=1.0, advantage=float(torch.randn((), generator=random)))


def take_step(policy, step, micro_batch_size):
    """One optimizer step on this rank's share of the samples of `step`; its metrics."""
    share = shard(NUM_PROMPTS, dist.get_world_size(), dist.get_rank())
    count = num_micro_batches(NUM_PROMPTS, NUM_GENERATIONS, dist.get_world_size(), micro_batch_size)
    own = list(samples(step))[share.start * NUM_GENERATIONS : share.stop * NUM_GENERATIONS]
    batches = micro_batches(own, micro_batch_size, PAD, num_micro_batches=count)
    return policy.step(batches, add_scales(local_scale(batches), policy.device))
