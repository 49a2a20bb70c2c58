"""The work of a generation's steps: plans, micro-batches, and the log-probabilities that ratios begin from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import mean

from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.reuse import batch_of
from grpo_workload.algorithm.step_plan import Plan, plan
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.memory.memory_error import explained_memory
from grpo_workload.training.exchange import micro_batches
from grpo_workload.training.rollout import Generation, Rollout
from grpo_workload.training.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch of a generation."""

    rollout: Rollout
    plan: Plan
    micro_batches: Iterable[MicroBatch]  # of this rank; a list if several steps train on them


def prepare(run: Run, generation: Generation) -> dict[int, Work]:
    """Plan the training on each batch of a generation, before its first step; collective.

    Micro-batches that later steps reuse store log-probabilities under the current weights, or with the correction
    `bypass` the generator's.
    """
    training = run.config.training
    shares, group = run.policy.shares_prompts, run.policy.group
    sequence = 1 if group is None else group.size
    plans = {
        batch: plan(rollout.facts, training, shares_prompts=shares, sequence=sequence)
        for batch, rollout in generation.rollouts.items()
    }
    if len(plans) > 1:
        mean_tokens = mean(one.scale.num_tokens for one in plans.values())
        plans = {batch: replace(one, scale=replace(one.scale, mean_tokens=mean_tokens)) for batch, one in plans.items()}
    later = {batch_of(step, training) for step in generation.steps[1:]}
    works = {}
    for batch, rollout in generation.rollouts.items():
        made: Iterable[MicroBatch] = micro_batches(plans[batch], rollout.samples, run.rank, group)
        if batch in later:
            takes_generators = training.importance_sampling_correction == "bypass"
            made = [one if takes_generators else _with_old_logprobs(run, one) for one in made]
        works[batch] = Work(rollout=rollout, plan=plans[batch], micro_batches=made)
    return works


def _with_old_logprobs(run: Run, batch: MicroBatch) -> MicroBatch:
    training = run.config.training
    with explained_memory(batch):
        logprobs_BC = run.policy.logprobs(batch, training.temperature, Truncation.of(training), Penalties.of(training))
    return replace(batch, old_logprobs_BC=logprobs_BC.cpu())
