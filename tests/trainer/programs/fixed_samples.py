"""Samples of steps that are the same on any number of ranks; programs import this after `environment.prepare`."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from grpo_workload.algorithm.reuse import batch_of
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.step_plan import Fact, plan
from grpo_workload.data.shard import shard
from grpo_workload.rewards.table import tabulate
from grpo_workload.training.exchange import micro_batches
from grpo_workload.training.rollout import Generation, Rollout
from grpo_workload.training.work import prepare

NUM_PROMPTS, NUM_GENERATIONS = 5, 3  # over 3 ranks: shares of 2, 2 and 1 prompts
PAD = 2


def samples(step):
    """Yield the samples of a step. In step 1 only two have an advantage, so one of three ranks has nothing to train."""
    random = torch.Generator().manual_seed(step)

    def tokens(low, high):
        length = int(torch.randint(low, high, (), generator=random))
        return tuple(torch.randint(3, 250, (length,), generator=random).tolist())

    for index in range(NUM_PROMPTS):
        prompt = Prompt(index=index, text="", token_ids=tokens(3, 12))
        for number in range(NUM_GENERATIONS):
            ids = tokens(1, 9)
            completion = Completion(
                token_ids=ids, logprobs=(-5.0,) * len(ids), text="", finish_reason="stop", weight_version=0
            )
            advantage = float(torch.randn((), generator=random)) * (
                step != 1 or index * NUM_GENERATIONS + number in (4, 9)
            )
            yield Sample(prompt=prompt, completion=completion, reward=1.0, advantage=advantage)


def take_step(policy, step, training, *, broken=False):
    """Take an optimizer step on this rank's share of the samples of `step`; return its metrics.

    With `broken`, the loss of the last sample, which only the last rank has, is infinite.
    """
    every = list(samples(step))
    if broken:
        every[-1] = replace(every[-1], advantage=math.inf)
    return train_on(policy, by_rank(every), training)


def by_rank(every):
    """Return the samples of a step by the rank that owns them."""
    shares = [shard(NUM_PROMPTS, dist.get_world_size(), rank) for rank in range(dist.get_world_size())]
    return [every[share.start * NUM_GENERATIONS : share.stop * NUM_GENERATIONS] for share in shares]


def take_generation(policy, config):
    """Take four optimizer steps on the samples of steps 1 and 3, as if they were sampled now; return their metrics."""
    training = config.training.model_copy(update={"steps_per_generation": 2, "num_iterations": 2})
    config = config.model_copy(update={"training": training})
    rank, rollouts = dist.get_rank(), {}
    for batch, step in enumerate((1, 3)):
        owned = by_rank(list(samples(step)))
        facts = [[fact(sample) for sample in own] for own in owned]
        rollouts[batch] = Rollout(step=batch, samples=owned[rank], table=tabulate({}, []), facts=facts)
    run: Any = SimpleNamespace(config=config, rank=rank, policy=policy)
    works = prepare(run, Generation(steps=range(4), rollouts=rollouts, timeouts={}, generated_tokens=0))
    turn = [works[batch_of(step, training)] for step in range(4)]
    return [policy.step(work.micro_batches, work.plan.num_micro_batches, work.plan.scale) for work in turn]


def train_on(policy, owned, training):
    """Take an optimizer step on the samples `owned[rank]`; return its metrics."""
    facts = [[fact(sample) for sample in own] for own in owned]
    sequence = policy.group.size if policy.group else 1
    work = plan(facts, training, shares_prompts=policy.shares_prompts, sequence=sequence)
    batches = micro_batches(work, owned[dist.get_rank()], dist.get_rank(), policy.group)
    return policy.step(batches, work.num_micro_batches, work.scale)


def fact(sample):
    """Return what all ranks know of a sample."""
    prompt_tokens, tokens = len(sample.prompt.token_ids), len(sample.completion.token_ids)
    is_truncated = sample.completion.finish_reason == "length"
    prompt = sample.prompt.index, prompt_tokens
    return Fact(prompt_tokens, tokens, is_truncated, sample.reward, sample.advantage, prompt=prompt)


def shares_prompts(policy, step, training):
    """Return whether some of the samples of `step` share a prompt when `policy` trains on them."""
    facts = [[fact(sample) for sample in own] for own in by_rank(list(samples(step)))]
    work = plan(facts, training, shares_prompts=policy.shares_prompts)
    return any(piece.shared for own in work.bins for pieces in own for piece in pieces)
