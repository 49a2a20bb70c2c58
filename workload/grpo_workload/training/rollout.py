"""The first half of a step: sample completions, score them, journal them, and compute their advantages.

A step trains on its own batch of prompts, always. With `maxStaleness` n, the prompts of step t + n begin to be sampled
with the weights that t updates have made. So no token is older than n updates when it is trained on, none is dropped,
long completions are as likely as they were sampled, and ranks need not agree on anything. With `stepsPerGeneration` or
`numIterations`, the batches of a generation (`algorithm/reuse.py`) are sampled together, before its first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_workload.algorithm.advantage import step_advantages
from grpo_workload.algorithm.reuse import batches_of, steps_of
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.step_plan import Fact
from grpo_workload.data.prompt_maker import PromptError
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import begin_scoring, score, take_logged, take_timeouts, weights_of
from grpo_workload.rewards.table import RewardTable, tabulate
from grpo_workload.rewards.trl_signature import Logged, TrainerState
from grpo_workload.storage.group_record import Group, Place
from grpo_workload.training.run import BegunBatch, Run

Part = tuple[RewardTable, list[tuple[int, int, bool]], list[tuple[bool, int]]]
"""What all ranks need of one rank's part of a batch: rewards, and the first and last fields of completions' `Fact`s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a step trains on."""

    step: int  # the first step that trains on it
    samples: list[Sample]  # completions of this rank
    table: RewardTable  # rewards of all ranks
    facts: list[list[Fact]]  # facts of each completion, by rank
    num_overlong: int  # number of prompts of the step whose rows were too long: cut, or replaced by other rows


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


class _Listener:
    """Begins to score what is sampled, and tells the other ranks that this one makes progress."""

    def __init__(self, run: Run, prompts: Sequence[Prompt]) -> None:
        self._rewards, self._prompts = run.rewards, prompts
        self.moved, self.meet = run.pulse.beat, run.pulse.meet

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        """See `Listener.finished`."""
        begin_scoring(self._rewards, self._prompts[position], completions)


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
            run.begun[batch] = _begin(run, batch, first, clock)
    begun = [run.begun.pop(batch) for batch in batches]

    run.report.phase("Generating")
    missing = {place: prompt for batch in begun for place, prompt in batch.missing.items()}
    asked = list(missing.values())
    answers = run.generator.generate(asked, training.num_generations, _Listener(run, asked))
    run.generator.sleep()
    clock.lap("generate")

    run.report.phase("Rewarding")
    scored, logged = _score(run, step, missing, answers)
    clock.lap("reward")

    groups = [[(batch.known | scored)[place] for place in batch.prompts] for batch in begun]
    for of_batch in groups:
        run.journal.write(of_batch)

    run.report.phase("Gathering")
    run.pulse.meet()
    rollouts = _gather(run, begun, groups)
    clock.lap("gather")
    return Generation(
        steps=steps,
        rollouts=dict(zip(batches, rollouts, strict=True)),
        timeouts=take_timeouts(run.rewards),
        logged={f"rewards/{name}/{key}": logs for name, one in logged.items() for key, logs in one.metrics.items()},
        generated_tokens=sum(len(completion.token_ids) for group in answers for completion in group),
    )


def _begin(run: Run, batch: int, step: int, clock: Clock) -> BegunBatch:
    """Take this rank's prompts of a batch, on which `step` is the first to train; collective.

    With `maxStaleness`, they also begin to be sampled: the step may be some steps ahead.
    """
    taken, num_overlong = _prompts(run, batch, clock)
    prompts = {(step, position): prompt for position, prompt in zip(run.share, taken, strict=True)}
    known = {place: group for place, prompt in prompts.items() if (group := _known(run, place, prompt))}
    missing = {place: prompt for place, prompt in prompts.items() if place not in known}
    if run.config.training.max_staleness:
        asked = list(missing.values())
        run.generator.begin(asked, run.config.training.num_generations, _Listener(run, asked))
    return BegunBatch(step=step, prompts=prompts, known=known, missing=missing, num_overlong=num_overlong)


def _prompts(run: Run, batch: int, clock: Clock) -> tuple[list[Prompt], int]:
    """Return this rank's prompts of a batch, and the number of all ranks' prompts whose rows were too long; collective.

    If any rank has one that cannot be used, all ranks raise PromptError.
    """
    prompts, complaint = [], None
    try:
        prompts = run.prompts.take(batch)
    except PromptError as error:
        complaint = str(error)
    clock.lap("prompts")
    gathered = gather((complaint, sum(prompt.is_overlong for prompt in prompts)))
    complaints = [one for one, _ in gathered if one is not None]
    clock.lap("gather")
    if complaints:
        raise PromptError(complaints[0])
    return prompts, sum(count for _, count in gathered)


def _known(run: Run, place: Place, prompt: Prompt) -> Group | None:
    """Return the prompt's group from the journal if it fits the current settings; None otherwise."""
    group = run.known.get(place)
    if (
        group is None
        or group.prompt_ids != prompt.token_ids
        or len(group.completions) != run.config.training.num_generations
    ):
        return None
    return group if set(group.rewards) == {reward.name for reward in run.rewards} else None


def _score(
    run: Run, now: int, prompts: Mapping[Place, Prompt], answers: Sequence[Sequence[Completion]]
) -> tuple[dict[Place, Group], dict[str, Logged]]:
    """Score this rank's new completions at step `now`; returns their groups, and what users' functions logged."""
    num_generations = run.config.training.num_generations
    asked = [prompt for prompt in prompts.values() for _ in range(num_generations)]
    flat = [completion for group in answers for completion in group]
    state = TrainerState(global_step=now, max_steps=run.config.training.max_steps)
    table = run.event_loop.run(score(run.rewards, asked, flat, run.pulse.beat, state=state))
    logged = take_logged(run.rewards)
    groups = {
        (step, position): Group(
            step=step,
            position=position,
            num_prompts=run.config.training.prompts_per_step,
            prompt_index=prompt.index,
            prompt_ids=prompt.token_ids,
            completions=tuple(group),
            rewards={name: values[own] for name, values in zip(table.names, table.values, strict=True)},
            extra={name: one.extra_of(own) for name, one in logged.items() if one.extra},
        )
        for number, (((step, position), prompt), group) in enumerate(zip(prompts.items(), answers, strict=True))
        for own in [slice(number * num_generations, (number + 1) * num_generations)]
    }
    return groups, logged


def _gather(run: Run, begun: Sequence[BegunBatch], groups: Sequence[Sequence[Group]]) -> list[Rollout]:
    """Gather rewards, which advantages need, and lengths, which metrics need; collective.

    Returns:
        What is trained on of each batch, whose groups of this rank are in `groups`.
    """
    training = run.config.training
    by_rank = gather([_part(run, batch.step, own) for batch, own in zip(begun, groups, strict=True)])
    parts: list[list[Part]] = [list(ranks) for ranks in zip(*by_rank, strict=True)]
    tables = [RewardTable.concat([rank_table for rank_table, _, _ in ranks]) for ranks in parts]
    # Of all batches together, as TRL: `scaleRewards: batch` divides by the deviation of what is sampled at once.
    totals = [total for table in tables for total in table.totals]
    values = [[one for table in tables for one in table.values[place]] for place in range(len(run.rewards))]
    advantages = iter(step_advantages(totals, values, [reward.weight for reward in run.rewards], training))
    rollouts = []
    for batch, own, ranks, table in zip(begun, groups, parts, tables, strict=True):
        facts = [
            [
                Fact(*lengths, reward, next(advantages), *marks)
                for lengths, reward, marks in zip(rank_lengths, rank_table.totals, rank_marks, strict=True)
            ]
            for rank_table, rank_lengths, rank_marks in ranks
        ]
        flat = [
            (prompt, completion, group.extra_of(number))
            for prompt, group in zip(batch.prompts.values(), own, strict=True)
            for number, completion in enumerate(group.completions)
        ]
        samples = [
            Sample(prompt=prompt, completion=completion, reward=fact.reward, advantage=fact.advantage, extra=extra)
            for (prompt, completion, extra), fact in zip(flat, facts[run.rank], strict=True)
        ]
        rollouts.append(
            Rollout(step=batch.step, samples=samples, table=table, facts=facts, num_overlong=batch.num_overlong)
        )
    return rollouts


def _part(run: Run, step: int, groups: Sequence[Group]) -> Part:
    """Return the part of this rank, from its groups."""
    flat = [(group, completion) for group in groups for completion in group.completions]
    values = [[value for group in groups for value in group.rewards[reward.name]] for reward in run.rewards]
    lengths = [
        (len(group.prompt_ids), len(completion.token_ids), completion.finish_reason == "length")
        for group, completion in flat
    ]
    marks = [(all(map(math.isfinite, completion.logprobs)), step - completion.weight_version) for _, completion in flat]
    return tabulate(weights_of(run.rewards), values), lengths, marks
