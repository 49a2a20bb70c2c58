"""Rewards of completions: built-in functions and the user's own, weighted and summed.

Each call has a time limit (rewards[].timeoutSeconds). Users' functions run in processes (`process`), which are killed
then. math-verify has processes and a limit for each answer (`math_answers`). reasoning-gym's scorers run in a thread.
Python cannot kill a thread, so it lasts until the rank ends. If it also holds the global interpreter lock (GIL), Python
cannot even report the timeout: then faulthandler, which needs no GIL, ends the rank and prints the stacks of its
threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import REWARD_SECONDS, RewardConfig
from grpo_spec.words import counted
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.rewards.builtin import accuracy, builtin
from grpo_workload.rewards.judge import Judge
from grpo_workload.rewards.scorer import Circumstances, Function, RewardError, Scorer, about_returned, of_row
from grpo_workload.rewards.table import RewardTable, tabulate
from grpo_workload.rewards.trl_signature import Logged, ReturnedError, TrainerState, Values, as_values, spread
from grpo_workload.rewards.user_function import UserFunction

STDERR = 2
LOCK_GRACE = 10.0
"""Seconds after a call's time limit in which Python must report the timeout; then faulthandler ends the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its name in the metrics and its weight in the sum."""

    name: str
    weight: float
    scorer: Scorer
    timeout_seconds: float = REWARD_SECONDS  # limit of one call
    config: RewardConfig | None = field(default=None, compare=False)


def build_rewards(
    configs: Sequence[RewardConfig],
    source: PromptSource,
    *,
    running: Sequence[Reward] = (),
    has_environments: bool = False,
) -> list[Reward]:
    """Find the functions, and start the processes of users' functions.

    Those of `running` rewards with the same settings are used again: a judge's model may be in their memory.
    `has_environments`: whether the job has.

    Raises:
        ConfigError: a module or attribute is missing, or a function does not fit the dataset, or does not take the
            arguments of its calls; names the reward.
        RewardError: the process of a function ended, or did not import the function in time.
    """
    rewards = [
        Reward(
            name=config.name,
            weight=config.weight,
            scorer=_running(config, running) or _make_scorer(config, source),
            timeout_seconds=config.timeout_seconds,
            config=config,
        )
        for config in configs
    ]
    try:
        for reward in rewards:
            if all(reward.scorer is not other.scorer for other in running):
                reward.scorer.ready()
        for reward in rewards:
            reward.scorer.check_columns(source, has_environments=has_environments)
    except (ConfigError, RewardError):
        close_rewards(rewards)
        raise
    return rewards


def close_rewards(rewards: Sequence[Reward]) -> None:
    """End all processes and requests of rewards."""
    for reward in rewards:
        reward.scorer.close()


def wants_environments(rewards: Sequence[Reward]) -> bool:
    """Whether any function reads the environments of episodes, so that their states have to be kept until then."""
    return any(reward.scorer.wants_environments for reward in rewards)


def weights_of(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return the weight of each reward, by name."""
    return {reward.name: reward.weight for reward in rewards}


def begin_check(rewards: Sequence[Reward], prompt: Prompt) -> None:
    """Start to compare the references of a prompt's row with themselves."""
    for reward in rewards:
        reward.scorer.check_row(prompt)


def end_check(rewards: Sequence[Reward], dataset: str) -> None:
    """Log which rows of `dataset`, a field's name, have references that cannot be compared."""
    for reward in rewards:
        reward.scorer.end_check(dataset)


def begin_scoring(rewards: Sequence[Reward], prompt: Prompt, completions: Sequence[Completion]) -> None:
    """Start what can be scored before all completions are there; `score` gets the same completions later."""
    if kept := [completion for completion in completions if not completion.is_lost]:
        for reward in rewards:
            reward.scorer.begin(prompt, kept)


def take_timeouts(rewards: Sequence[Reward]) -> dict[str, int]:
    """Return the number of answers since the last call that could not be compared in time, by name of the reward."""
    counts = ((reward.name, reward.scorer.take_timeouts()) for reward in rewards)
    return {name: count for name, count in counts if count is not None}


def take_logged(rewards: Sequence[Reward]) -> dict[str, Logged]:
    """Return what users' functions and judges logged in the last call of `score`, once, by name of the reward.

    It is of the completions that they have seen: all but lost episodes.
    """
    found = ((reward.name, reward.scorer.take_logged()) for reward in rewards)
    return {name: logged for name, logged in found if logged is not None}


async def score(
    rewards: Sequence[Reward],
    prompts: list[Prompt],
    completions: list[Completion],
    moved: Callable[[], None] = lambda: None,
    *,
    state: TrainerState = TrainerState(),
    seed: int = 0,
) -> RewardTable:
    """Score completions[i], an answer to prompts[i], with every function; the functions run concurrently.

    `moved` is called, in any thread, when an answer has been scored while others are still to be. Users'
    functions get `state`, and draw random numbers that depend on `seed` and their names. No function sees episodes
    that were lost.

    Raises:
        RewardError: a function raised, took too long, or did not return one finite number or None per completion.
        ConfigError: the same, in the first call of a user's function: it returned no numbers, or too many or few.
    """
    assert len(prompts) == len(completions)
    weights = weights_of(rewards)
    is_there = [not completion.is_lost for completion in completions]
    prompts, completions = [*compress(prompts, is_there)], [*compress(completions, is_there)]
    if not completions:
        return tabulate(weights, [[None] * len(is_there) for _ in rewards])
    circumstances = Circumstances(moved=moved, state=state, seed=seed)
    calls = {reward: asyncio.ensure_future(_call(reward, prompts, completions, circumstances)) for reward in rewards}
    if watched := [reward for reward in rewards if reward.scorer.is_watched]:
        with _interpreter_watched(max(reward.timeout_seconds for reward in watched) + LOCK_GRACE):
            await asyncio.gather(*(calls[reward] for reward in watched))
    return tabulate(weights, [spread(values, is_there) for values in await asyncio.gather(*calls.values())])


async def _call(
    reward: Reward, prompts: list[Prompt], completions: list[Completion], circumstances: Circumstances
) -> Values:
    seconds = None if reward.scorer.limits_itself else reward.timeout_seconds
    try:
        async with asyncio.timeout(seconds) as limit:
            result = await _in_thread(reward.name, partial(reward.scorer.score, prompts, completions, circumstances))
    except (ConfigError, RewardError):
        raise
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise RewardError(
                f"rewards[{reward.name}] was not done with {counted(len(completions), 'completion')} within "
                f"{reward.timeout_seconds:g} s: does it wait for something that never comes? If it needs longer, raise "
                "its timeoutSeconds"
            ) from error
        raise RewardError(f"rewards[{reward.name}] raised {type(error).__name__}: {error}") from error
    try:
        return _finite(reward.name, as_values(result, len(prompts)), prompts)
    except ReturnedError as error:
        raise RewardError(about_returned(reward.name, error, prompts)) from error


async def _in_thread(name: str, call: Callable[[], Values]) -> Values:
    """Like `asyncio.to_thread`, but neither the end of the event loop nor that of Python waits for the thread."""
    done: Future[Values] = Future()
    done.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            done.set_result(context.run(call))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name=f"rewards[{name}]", daemon=True).start()
    return await asyncio.wrap_future(done)


@contextmanager
def _interpreter_watched(seconds: float) -> Iterator[None]:
    """End the rank, with the stacks of all threads on stderr, if the body takes longer than `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _finite(name: str, values: Values, prompts: Sequence[Prompt]) -> Values:
    """Return the values, or raise RewardError for one that is not finite.

    NaN is refused. TRL treats it as None, since it stores both as NaN. But NaN is rarely meant, it comes from 0 / 0,
    and a run whose reward is always NaN would succeed without learning anything.
    """
    for number, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(
                f"rewards[{name}] returned {value} for completion {number} of {len(prompts)}"
                f"{of_row(number, prompts)}; return a finite number, or None where the reward does not apply"
            )
    return values


def _running(config: RewardConfig, running: Sequence[Reward]) -> Scorer | None:
    return next((reward.scorer for reward in running if reward.config == config and reward.scorer.is_reusable), None)


def _make_scorer(config: RewardConfig, source: PromptSource) -> Scorer:
    if config.accuracy is not None:
        return accuracy(config, source)
    if config.judge is not None:
        return Judge(config.name, config.judge, source, os.environ)
    return UserFunction(config, os.environ) if config.code is not None else Function(builtin(config, source))
