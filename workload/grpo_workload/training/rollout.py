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
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.step_plan import EpisodeFact, Fact
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import take_timeouts, weights_of
from grpo_workload.rewards.table import RewardTable, tabulate
from grpo_workload.storage.group_record import Group
from grpo_workload.training.begin_batch import begin
from grpo_workload.training.kl_penalty import divergences
from grpo_workload.training.run import Run
from grpo_workload.training.sampling import Sampled, SampledBatch, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's completions of a batch, as far as all ranks need them."""

    table: RewardTable
    facts: list[Fact]  # before advantages are known
    kls: list[float]  # KL divergences; empty without `klInReward`

    @staticmethod
    def of(run: Run, step: int, groups: Sequence[tuple[Prompt, Group]], kls: Iterator[float]) -> Part:
        """Make the part of this rank from its groups; takes as many of `kls` as they have completions."""
        flat = [(prompt, completion) for prompt, group in groups for completion in group.completions]
        numbers: dict[tuple[int, ...], int] = {}  # of the different prompts

        def numbered(prompt: Prompt, completion: Completion) -> tuple[int, int] | None:
            ids = completion.prompt_ids(prompt)
            return None if prompt.images else (numbers.setdefault(ids, len(numbers)), len(ids))

        values = [[value for _, group in groups for value in group.rewards[reward.name]] for reward in run.rewards]
        table = tabulate(weights_of(run.rewards), values)
        facts = [
            Fact(
                prompt_tokens=sum(completion.num_read(prompt)) - completion.num_own,
                tokens=completion.num_own,
                is_truncated=completion.finish_reason == "length",
                reward=total,
                advantage=math.nan,
                has_logprobs=all(map(math.isfinite, completion.all_logprobs)),
                staleness=step - completion.weight_version,
                episode=EpisodeFact.of(completion.episode) if completion.episode else None,
                sequences=completion.num_read(prompt) if completion.episode and completion.episode.forks else (),
                prompt=numbered(prompt, completion),
            )
            for (prompt, completion), total in zip(flat, table.totals, strict=True)
        ]
        return Part(table=table, facts=facts, kls=list(islice(kls, len(flat))))

    def totals(self, beta: float) -> list[float]:
        """Return the rewards that advantages are computed from: less `beta` times the KL divergence, if that counts."""
        if not self.kls:
            return self.table.totals
        return [total - beta * kl for total, kl in zip(self.table.totals, self.kls, strict=True)]

    def with_advantages(self, advantages: Iterator[float]) -> list[Fact]:
        """Return the facts with their advantages, which come next in `advantages`."""
        return [fact._replace(advantage=next(advantages)) for fact in self.facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The samples that a step trains on."""

    step: int  # the first step that trains on it
    samples: list[Sample]  # completions of this rank
    table: RewardTable  # rewards of all ranks
    facts: list[list[Fact]]  # facts of each completion, by rank
    metrics: dict[str, float] = field(default_factory=dict)  # of its prompts, over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The batches that are sampled at once, and the steps that train on them."""

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
        EnvironmentFailedError: too many episodes were lost; every rank raises it.
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
    for sampled_batch in sampled.batches:
        run.journal.write(sampled_batch.step, [group for _, group in sampled_batch.groups])

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
    own = [Part.of(run, batch.step, batch.groups, kls) for batch in sampled.batches]
    by_batch: list[list[Part]] = [list(ranks) for ranks in zip(*gather(own), strict=True)]
    # Of all batches together, as TRL: `scaleRewards: batch` divides by the deviation of what is sampled at once.
    parts = [part for ranks in by_batch for part in ranks]
    advantages = iter(
        step_advantages(
            [total for part in parts for total in part.totals(training.beta)],
            [[value for part in parts for value in part.table.values[place]] for place in range(len(run.rewards))],
            [reward.weight for reward in run.rewards],
            [fact.tokens for part in parts for fact in part.facts],
            training,
        )
    )
    rollouts = []
    for batch, ranks in zip(sampled.batches, by_batch, strict=True):
        facts = [part.with_advantages(advantages) for part in ranks]
        rollouts.append(
            Rollout(
                step=batch.step,
                samples=_samples(batch, facts[run.rank]),
                table=RewardTable.concat([part.table for part in ranks]),
                facts=facts,
                metrics=batch.metrics | _mean_kl(ranks),
            )
        )
    return rollouts


def _samples(batch: SampledBatch, facts: Sequence[Fact]) -> list[Sample]:
    """Make the samples of this rank, of whose completions `facts` are."""
    flat = [
        (prompt, completion, group.extra_of(number))
        for prompt, group in batch.groups
        for number, completion in enumerate(group.completions)
    ]
    return [
        Sample(prompt=prompt, completion=completion, reward=fact.reward, advantage=fact.advantage, extra=extra)
        for (prompt, completion, extra), fact in zip(flat, facts, strict=True)
    ]


def _mean_kl(ranks: Sequence[Part]) -> dict[str, float]:
    """The metric kl of a batch: the mean over tokens; none without `klInReward`."""
    pairs = [(kl, fact.tokens) for part in ranks for fact, kl in zip(part.facts, part.kls, strict=False)]
    known = [(kl, tokens) for kl, tokens in pairs if math.isfinite(kl)]
    return {"kl": sum(kl for kl, _ in known) / sum(tokens for _, tokens in known)} if known else {}
