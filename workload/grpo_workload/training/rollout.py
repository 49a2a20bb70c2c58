"""The first half of a step: sample completions, score them, journal them, and compute their advantages.

A step trains on its own batch of prompts, always. With `maxStaleness` n, the prompts of step t + n begin to be sampled
with the weights that t updates have made. So no token is older than n updates when it is trained on, none is dropped,
long completions are as likely as they were sampled, and ranks need not agree on anything. With `stepsPerGeneration` or
`numIterations`, the batches of a generation (`algorithm/reuse.py`) are sampled together, before its first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from grpo_workload.algorithm.advantage import step_advantages
from grpo_workload.algorithm.reuse import batches_of, steps_of
from grpo_workload.algorithm.samples import Sample
from grpo_workload.algorithm.step_plan import Fact
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import take_timeouts, weights_of
from grpo_workload.rewards.table import RewardTable, tabulate
from grpo_workload.storage.group_record import Group
from grpo_workload.training.kl_penalty import divergences
from grpo_workload.training.run import Run
from grpo_workload.training.sampling import Sampled, begin, sample

Part = tuple[RewardTable, list[tuple[int, int, bool]], list[tuple[bool, int]], list[float]]
"""What all ranks need of one rank's part of a batch: rewards, the first and last fields of completions' `Fact`s, and
with `klInReward` their KL divergences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a step trains on."""

    step: int  # the first step that trains on it
    samples: list[Sample]  # completions of this rank
    table: RewardTable  # rewards of all ranks
    facts: list[list[Fact]]  # facts of each completion, by rank
    metrics: dict[str, float] = field(default_factory=dict)  # of its prompts, over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What is sampled at once, and the steps that train on it."""

    steps: range
    rollouts: dict[int, Rollout]  # by batch: see `reuse.batch_of`
    timeouts: Mapping[str, int]  # answers of this rank that could not be compared in time, by reward; each scored 0
    generated_tokens: int  # tokens that this rank sampled; groups from the journal do not count
    logged: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # values that its users' rewards logged, by metric


def roll_out(run: Run, step: int, clock: Clock) -> Generation:
    """Sample and score this rank's share of the generation that begins at `step`; collective.

    After a restart, groups that the journal already has under the same weights are used again.

    Raises:
        PromptError: a prompt of the generation, on any rank, cannot be used; every rank raises the same error.
        PreprocessError: a prompt of this rank could not be prepared.
        RewardError: a reward function failed.
    """
    training = run.config.training
    steps = steps_of(step, training)
    batches = batches_of(steps, training)
    run.report.phase("Preparing")
    # Later steps begin early only where none shares a generation: there a step's batch has the step's own number.
    later = range(steps.stop, min(steps.stop + training.max_staleness, training.max_steps))
    for batch, first in [*batches.items(), *zip(later, later, strict=True)]:
        if batch not in run.begun:
            run.begun[batch] = begin(run, batch, first, clock)
    sampled = sample(run, [run.begun.pop(batch) for batch in batches], step, clock)
    for one in sampled.batches:
        run.journal.write(one.step, [group for _, group in one.groups])

    run.report.phase("Gathering")
    run.pulse.meet()
    kls: Iterator[float] = iter(())
    if training.kl_in_reward:
        clock.lap("gather")
        groups = [group for batch in sampled.batches for group in batch.groups]
        own = [(prompt, completion) for prompt, group in groups for completion in group.completions]
        kls = iter(divergences(run.policy, own, training))
        clock.lap("train")
    rollouts = _gather(run, sampled, kls)
    clock.lap("gather")
    return Generation(
        steps=steps,
        rollouts=dict(zip(batches, rollouts, strict=True)),
        timeouts=take_timeouts(run.rewards),
        logged=sampled.logged,
        generated_tokens=sampled.generated_tokens,
    )


def _gather(run: Run, sampled: Sampled, kls: Iterator[float]) -> list[Rollout]:
    """Gather rewards, which advantages need, and lengths, which metrics need, of each batch; collective.

    `kls` are the KL divergences of this rank's completions, or empty.
    """
    training = run.config.training
    by_rank = gather([_part(run, batch.step, [group for _, group in batch.groups], kls) for batch in sampled.batches])
    parts: list[list[Part]] = [list(ranks) for ranks in zip(*by_rank, strict=True)]
    tables = [RewardTable.concat([rank_table for rank_table, *_ in ranks]) for ranks in parts]
    # Of all batches together, as TRL: `scaleRewards: batch` divides by the deviation of what is sampled at once.
    totals = [total for table in tables for total in table.totals]
    if training.kl_in_reward:
        of_all = [kl for ranks in parts for *_, rank_kls in ranks for kl in rank_kls]
        totals = [total - training.beta * kl for total, kl in zip(totals, of_all, strict=True)]
    values = [[one for table in tables for one in table.values[place]] for place in range(len(run.rewards))]
    tokens = [count for ranks in parts for _, lengths, *_ in ranks for _, count, _ in lengths]
    advantages = iter(step_advantages(totals, values, [reward.weight for reward in run.rewards], tokens, training))
    rollouts = []
    for batch, ranks, table in zip(sampled.batches, parts, tables, strict=True):
        facts = [
            [
                Fact(*lengths, reward, next(advantages), *marks)
                for lengths, reward, marks in zip(rank_lengths, rank_table.totals, rank_marks, strict=True)
            ]
            for rank_table, rank_lengths, rank_marks, _ in ranks
        ]
        flat = [
            (prompt, completion, group.extra_of(number))
            for prompt, group in batch.groups
            for number, completion in enumerate(group.completions)
        ]
        samples = [
            Sample(prompt=prompt, completion=completion, reward=fact.reward, advantage=fact.advantage, extra=extra)
            for (prompt, completion, extra), fact in zip(flat, facts[run.rank], strict=True)
        ]
        rollouts.append(
            Rollout(
                step=batch.step,
                samples=samples,
                table=table,
                facts=facts,
                metrics=batch.metrics | _mean_kl(ranks),
            )
        )
    return rollouts


def _mean_kl(ranks: Sequence[Part]) -> dict[str, float]:
    """The metric kl of a batch: the mean over tokens; none without `klInReward`."""
    pairs = [(kl, tokens) for _, lengths, _, kls in ranks for (_, tokens, _), kl in zip(lengths, kls, strict=False)]
    known = [(kl, tokens) for kl, tokens in pairs if math.isfinite(kl)]
    return {"kl": sum(kl for kl, _ in known) / sum(tokens for _, tokens in known)} if known else {}


def _part(run: Run, step: int, groups: Sequence[Group], kls: Iterator[float]) -> Part:
    """Return the part of this rank, from its groups; takes as many of `kls` as they have completions."""
    flat = [(group, completion) for group in groups for completion in group.completions]
    values = [[value for group in groups for value in group.rewards[reward.name]] for reward in run.rewards]
    lengths = [
        (len(group.prompt_ids), len(completion.token_ids), completion.finish_reason == "length")
        for group, completion in flat
    ]
    marks = [(all(map(math.isfinite, completion.logprobs)), step - completion.weight_version) for _, completion in flat]
    return tabulate(weights_of(run.rewards), values), lengths, marks, list(islice(kls, len(flat)))
