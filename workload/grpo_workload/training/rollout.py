"""The first half of a step: sample completions, score them, journal them, and compute their advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_workload.algorithm.advantage import group_advantages
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.step_plan import Fact
from grpo_workload.data.prompt_maker import PromptError
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import begin_scoring, score, take_timeouts, weights_of
from grpo_workload.rewards.table import RewardTable, tabulate
from grpo_workload.storage.group_record import Group
from grpo_workload.training.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a step trains on."""

    samples: list[Sample]  # completions of this rank
    table: RewardTable  # rewards of all ranks
    facts: list[list[Fact]]  # facts of each completion, by rank
    timeouts: Mapping[str, int]  # answers of this rank that could not be compared in time, by reward; each scored 0
    num_overlong: int  # number of prompts of the step whose rows were too long: cut, or replaced by other rows
    generated_tokens: int  # tokens that this rank sampled in this step; groups from the journal do not count


class _Listener:
    """Begins to score what is sampled, and tells the other ranks that this one makes progress."""

    def __init__(self, run: Run, prompts: Sequence[Prompt]) -> None:
        self._rewards, self._prompts = run.rewards, prompts
        self.moved, self.meet = run.pulse.beat, run.pulse.meet

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        """See `Listener.finished`."""
        begin_scoring(self._rewards, self._prompts[position], completions)


def roll_out(run: Run, step: int, clock: Clock) -> Rollout:
    """Sample and score this rank's share of a step; collective.

    After a restart, groups that the journal already has under the same weights are used again.

    Raises:
        PromptError: a prompt of the step, on any rank, cannot be used; every rank raises the same error.
        PreprocessError: a prompt of this rank could not be prepared.
        RewardError: a reward function failed.
    """
    training = run.config.training
    run.report.phase("Preparing")
    taken, num_overlong = _prompts(run, step, clock)
    prompts = dict(zip(run.share, taken, strict=True))

    run.report.phase("Generating")
    groups = {position: group for position, prompt in prompts.items() if (group := _known(run, step, position, prompt))}
    missing = {position: prompt for position, prompt in prompts.items() if position not in groups}
    asked = list(missing.values())
    answers = run.generator.generate(asked, training.num_generations, _Listener(run, asked))
    run.generator.sleep()
    clock.lap("generate")

    run.report.phase("Rewarding")
    groups |= _score(run, step, missing, answers)
    clock.lap("reward")

    ordered = [groups[position] for position in run.share]
    run.journal.write(ordered)

    run.report.phase("Gathering")
    run.pulse.meet()
    table, facts, samples = _gather(run, list(prompts.values()), ordered)
    clock.lap("gather")
    generated_tokens = sum(len(completion.token_ids) for group in answers for completion in group)
    return Rollout(
        samples=samples,
        table=table,
        facts=facts,
        timeouts=take_timeouts(run.rewards),
        num_overlong=num_overlong,
        generated_tokens=generated_tokens,
    )


def _prompts(run: Run, step: int, clock: Clock) -> tuple[list[Prompt], int]:
    """Return this rank's prompts, and the number of all ranks' prompts whose rows were too long; collective.

    If any rank has one that cannot be used, all ranks raise PromptError.
    """
    prompts, complaint = [], None
    try:
        prompts = run.prompts.take(step)
    except PromptError as error:
        complaint = str(error)
    clock.lap("prompts")
    gathered = gather((complaint, sum(prompt.is_overlong for prompt in prompts)))
    complaints = [one for one, _ in gathered if one is not None]
    clock.lap("gather")
    if complaints:
        raise PromptError(complaints[0])
    return prompts, sum(count for _, count in gathered)


def _known(run: Run, step: int, position: int, prompt: Prompt) -> Group | None:
    """Return the prompt's group from the journal if it fits the current settings; None otherwise."""
    group = run.known.get(position) if step == run.start.step else None
    if (
        group is None
        or group.prompt_ids != prompt.token_ids
        or len(group.completions) != run.config.training.num_generations
    ):
        return None
    return group if set(group.rewards) == {reward.name for reward in run.rewards} else None


def _score(
    run: Run, step: int, prompts: dict[int, Prompt], answers: Sequence[Sequence[Completion]]
) -> dict[int, Group]:
    """Score this rank's new completions, and return their groups by position."""
    num_generations = run.config.training.num_generations
    asked = [prompt for prompt in prompts.values() for _ in range(num_generations)]
    flat = [completion for group in answers for completion in group]
    table = run.event_loop.run(score(run.rewards, asked, flat, run.pulse.beat))
    return {
        position: Group(
            step=step,
            position=position,
            num_prompts=run.config.training.prompts_per_step,
            prompt_index=prompt.index,
            prompt_ids=prompt.token_ids,
            completions=tuple(group),
            rewards={
                name: values[number * num_generations : (number + 1) * num_generations]
                for name, values in zip(table.names, table.values, strict=True)
            },
        )
        for number, ((position, prompt), group) in enumerate(zip(prompts.items(), answers, strict=True))
    }


def _gather(
    run: Run, prompts: Sequence[Prompt], groups: Sequence[Group]
) -> tuple[RewardTable, list[list[Fact]], list[Sample]]:
    """Gather rewards, which advantages need, and lengths, which metrics need; collective.

    Returns:
        The reward table and the facts of all ranks, and this rank's samples.
    """
    training = run.config.training
    flat = [
        (prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group.completions
    ]
    own_values = [[value for group in groups for value in group.rewards[reward.name]] for reward in run.rewards]
    own_table = tabulate(weights_of(run.rewards), own_values)
    own_lengths = [
        (len(prompt.token_ids), len(completion.token_ids), completion.finish_reason == "length")
        for prompt, completion in flat
    ]
    own_finite = [all(map(math.isfinite, completion.logprobs)) for _, completion in flat]
    gathered = gather((own_table, own_lengths, own_finite))
    table = RewardTable.concat([rank_table for rank_table, _, _ in gathered])
    advantages = iter(group_advantages(table.totals, training.num_generations, training.scale_rewards))
    facts = [
        [
            Fact(*lengths, reward, next(advantages), is_finite)
            for lengths, reward, is_finite in zip(rank_lengths, rank_table.totals, rank_finite, strict=True)
        ]
        for rank_table, rank_lengths, rank_finite in gathered
    ]
    samples = [
        Sample(prompt=prompt, completion=completion, reward=fact.reward, advantage=fact.advantage)
        for (prompt, completion), fact in zip(flat, facts[run.rank], strict=True)
    ]
    return table, facts, samples
