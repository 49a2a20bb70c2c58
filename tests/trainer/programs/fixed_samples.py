"""Policies, and samples of steps that are the same on any number of ranks; imported after `environment.prepare`."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from grpo_spec.contract import Device
from grpo_workload.algorithm.reuse import batch_of
from grpo_workload.algorithm.step_plan import Fact, plan
from grpo_workload.data.shard import shard
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.table import tabulate
from grpo_workload.training.exchange import micro_batches
from grpo_workload.training.kl_penalty import divergences
from grpo_workload.training.rollout import Generation, Rollout
from grpo_workload.training.work import prepare
from support.trainer.samples import make_sample

NUM_PROMPTS, NUM_GENERATIONS = 5, 3  # over 3 ranks: shares of 2, 2 and 1 prompts
PAD = 2


def make_policy(config, device=Device.CPU, **options):
    """Return a policy in place of the one that this process has had."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Policy(config, device, timeout_seconds=300, pad_token_id=PAD, **options)


def resume(policy, checkpoints, **shape):
    """Load the newest checkpoint of a run."""
    source = checkpoints.find(None, world_size=dist.get_world_size(), **shape)
    assert source is not None
    source.load(policy)


def trained(policy, *, also_frozen=False):
    """Return copies of the parameters that are trained, whole, in host memory."""
    own = {name: one for name, one in policy.module.named_parameters() if one.requires_grad or also_frozen}
    with deepspeed.zero.GatheredParameters([*own.values()], enabled=policy.is_partitioned):
        return {name: one.detach().cpu().clone() for name, one in own.items()}


def samples(step):
    """Yield the samples of a step. In step 1 only two have an advantage, so one of three ranks has nothing to train."""
    random = torch.Generator().manual_seed(step)

    def tokens(low, high):
        length = int(torch.randint(low, high, (), generator=random))
        return tuple(torch.randint(3, 250, (length,), generator=random).tolist())

    for index in range(NUM_PROMPTS):
        prompt_ids = tokens(3, 12)
        for number in range(NUM_GENERATIONS):
            ids, has_advantage = tokens(1, 9), step != 1 or index * NUM_GENERATIONS + number in (4, 9)
            advantage = float(torch.randn((), generator=random)) * has_advantage
            yield make_sample(prompt_ids, ids, index=index, logprobs=(-5.0,) * len(ids), advantage=advantage)


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


def divergences_of(policy, training):
    """Return the KL divergences of the samples of step 0, over all ranks."""
    own = by_rank(list(samples(0)))[dist.get_rank()]
    mine = divergences(policy, [(sample.prompt, sample.completion) for sample in own], training)
    return [kl for part in gather(mine) for kl in part]


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
