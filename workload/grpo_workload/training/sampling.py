"""Samples and scores the prompt groups of a generation.

With `maxResampleTimes`, groups without any advantage are then replaced (`algorithm/resample.py`): all ranks share
further prompts, until each batch is full or the rounds are used up. Which prompts these are depends on the seed, the
step and the rewards alone, so nothing but the journal has to remember them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from grpo_workload.algorithm.resample import num_further, places, teaches
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.shard import shard
from grpo_workload.policy.model.router_replay import check_routed
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.ranks.seeds import step_seed
from grpo_workload.rewards.scoring import score, take_logged, weights_of
from grpo_workload.rewards.table import tabulate
from grpo_workload.rewards.trl_signature import TrainerState
from grpo_workload.storage.group_record import Group
from grpo_workload.training.begin_batch import ScoringListener, take_prompts
from grpo_workload.training.lost_episodes import check_lost
from grpo_workload.training.run import BegunBatch, Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """The samples of one rank of a batch."""

    step: int  # the first that trains on it
    groups: list[tuple[Prompt, Group]]  # on which the step trains, in the order of their positions
    metrics: dict[str, float]  # of its prompts, over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The samples of one rank of a generation."""

    batches: list[SampledBatch]
    generated_tokens: int  # groups from the journal do not count
    logged: Mapping[str, Sequence[float]]  # values that its users' rewards logged, by metric


@dataclass(slots=True)
class _Pool:
    """Groups of this rank that may be trained on, by slot."""

    begun: BegunBatch
    found: dict[int, tuple[Prompt, Group]]
    num_overlong: int
    teaches: dict[int, bool]  # by slot, of all ranks


def sample(run: Run, begun: Sequence[BegunBatch], now: int, clock: Clock) -> Sampled:
    """Sample and score what the journal does not have of some batches, and replace groups as the job says; collective.

    Raises:
        PromptError: a further prompt, on any rank, cannot be used; every rank raises the same error.
        PreprocessError: a further prompt of this rank could not be prepared.
        RewardError: a reward function failed.
        ConfigError: the first call of a user's function returned no numbers.
        EnvironmentFailedError: too many episodes were lost; every rank raises it.
    """
    limit = run.config.training.max_resample_times
    pools = [_Pool(one, {s: (one.prompts[s], g) for s, g in one.known.items()}, one.num_overlong, {}) for one in begun]
    asked = [(pool, slot, prompt) for pool in pools for slot, prompt in pool.begun.missing.items()]
    rounds = tokens = 0
    logged: dict[str, list[float]] = {}
    while True:
        tokens += _fill(run, asked, now, logged, rounds, clock)
        if not limit:
            break
        needed = _needed(run, pools, clock)
        if rounds == limit or not needed:
            break
        rounds += 1
        asked = _further(run, needed, rounds, clock)
    run.generator.sleep()
    if run.config.has_episodes:
        run.report.phase("Gathering")
        run.pulse.meet()
        # Before the groups are in the journal: the next attempt would find them there, and fail as well.
        found = [completion for pool in pools for _, group in pool.found.values() for completion in group.completions]
        check_lost(found, run.config.episodes.max_failed_share)
        clock.lap("gather")
    return Sampled(batches=[_chosen(run, pool, rounds) for pool in pools], generated_tokens=tokens, logged=logged)


def _fill(
    run: Run,
    asked: Sequence[tuple[_Pool, int, Prompt]],
    now: int,
    logged: dict[str, list[float]],
    rounds: int,
    clock: Clock,
) -> int:
    """Sample prompts and score them, at step `now` after so many rounds; returns the number of tokens sampled.

    Their groups go into the pools, and what users' functions log into `logged`.
    """
    training = run.config.training
    prompts = [prompt for *_, prompt in asked]
    run.report.phase("Generating")
    answers = run.generator.generate(prompts, training.num_generations, ScoringListener(run, prompts))
    if rounds == training.max_resample_times:
        run.generator.sleep()
    clock.lap("generate")
    run.report.phase("Rewarding")
    flat = [completion for group in answers for completion in group]
    each = [prompt for prompt in prompts for _ in range(training.num_generations)]
    if training.router_replay:
        for prompt, completion in zip(each, flat, strict=True):
            check_routed(prompt, completion)
    state = TrainerState(global_step=now, max_steps=training.max_steps)
    seed = step_seed(training.seed, now, run.rank) + rounds
    table = run.event_loop.run(score(run.rewards, each, flat, run.pulse.beat, state=state, seed=seed))
    is_there = [not completion.is_lost for completion in flat]
    reported = {name: one.spread(is_there) for name, one in take_logged(run.rewards).items()}
    for name, one in reported.items():
        for key, values in one.metrics.items():
            logged.setdefault(f"rewards/{name}/{key}", []).extend(values)
    for number, ((pool, slot, prompt), group) in enumerate(zip(asked, answers, strict=True)):
        own = slice(number * training.num_generations, (number + 1) * training.num_generations)
        pool.found[slot] = (
            prompt,
            Group(
                step=pool.begun.step,
                position=slot,
                slot=slot,
                num_prompts=training.prompts_per_step,
                prompt_index=prompt.index,
                prompt_ids=prompt.token_ids,
                completions=tuple(completion.without_state() for completion in group),
                rewards={name: values[own] for name, values in zip(table.names, table.values, strict=True)},
                extra={name: one.extra_of(own) for name, one in reported.items() if one.extra},
            ),
        )
    clock.lap("reward")
    return sum(completion.num_own for completion in flat)


def _needed(run: Run, pools: Sequence[_Pool], clock: Clock) -> dict[int, tuple[_Pool, int]]:
    """Return the pools that need further prompts, by index, each with how many; collective.

    A batch that comes from the journal as a whole was settled before.
    """
    run.report.phase("Gathering")
    run.pulse.meet()
    own = [
        {slot: (_teaches(run, group), slot in pool.begun.known) for slot, (_, group) in pool.found.items()}
        for pool in pools
    ]
    needed = {}
    for index, (pool, parts) in enumerate(zip(pools, zip(*gather(own), strict=True), strict=True)):
        found = {slot: facts for part in parts for slot, facts in part.items()}
        pool.teaches = {slot: is_useful for slot, (is_useful, _) in found.items()}
        count = num_further(pool.teaches, run.config.training.prompts_per_step)
        if count and not all(is_known for _, is_known in found.values()):
            needed[index] = pool, count
    clock.lap("gather")
    return needed


def _teaches(run: Run, group: Group) -> bool:
    weights = weights_of(run.rewards)
    values = [list(group.rewards[name]) for name in weights]
    return teaches(tabulate(weights, values).totals, values, list(weights.values()), run.config.training)


def _further(
    run: Run, needed: Mapping[int, tuple[_Pool, int]], round_number: int, clock: Clock
) -> list[tuple[_Pool, int, Prompt]]:
    """Return this rank's share of further prompts, with the pools that they are for and their slots; collective."""
    run.report.phase("Preparing")
    first = round_number * run.config.training.prompts_per_step
    slots = [(pool, first + number) for pool, count in needed.values() for number in range(count)]
    own = [slots[index] for index in shard(len(slots), run.world_size, run.rank)]
    asked = []
    for pool, _ in needed.values():
        ours = [slot for one, slot in own if one is pool]
        prompts, num_overlong = take_prompts(run, partial(run.prompts.further, pool.begun.batch, ours), clock)
        pool.num_overlong += num_overlong
        asked += [(pool, slot, prompt) for slot, prompt in zip(ours, prompts, strict=True)]
    return asked


def _chosen(run: Run, pool: _Pool, rounds: int) -> SampledBatch:
    """Return this rank's groups on which a batch's step trains."""
    position = {slot: slot for slot in pool.found}
    metrics: dict[str, float] = {}
    if run.config.dataset.overlong_prompts != "error":
        metrics["prompts/overlong"] = pool.num_overlong
    if run.config.training.max_resample_times:
        position = places(pool.teaches, run.config.training.prompts_per_step)
        metrics["resampling/rounds"] = rounds
        metrics["resampling/groups"] = len(pool.teaches) - run.config.training.prompts_per_step
        metrics["resampling/frac_reward_zero_std"] = 1 - sum(pool.teaches.values()) / len(pool.teaches)
    if run.rank == 0:
        _log_replaced(run, pool, sum(slot != at for slot, at in position.items()), rounds)
    kept = {position[slot]: found for slot, found in pool.found.items() if slot in position}
    return SampledBatch(
        step=pool.begun.step,
        groups=[(prompt, replace(group, position=at)) for at, (prompt, group) in sorted(kept.items())],
        metrics=metrics,
    )


def _log_replaced(run: Run, pool: _Pool, num_groups: int, rounds: int) -> None:
    """Log how many of a batch's rows, over all ranks, are cut or replaced, and why."""
    step, action = pool.begun.step + 1, run.config.dataset.overlong_prompts
    if pool.num_overlong:
        logger.info("step %d: %d rows are too long; dataset.overlongPrompts: %s", step, pool.num_overlong, action)
    if num_groups:
        text = "step %d: %d groups that teach nothing are replaced, after %d rounds (training.maxResampleTimes)"
        logger.info(text, step, num_groups, rounds)
