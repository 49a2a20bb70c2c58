"""Starts what a job with tools or environments has besides others: where these run, and what plays episodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_spec.contract import Contract
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.overlong import prompt_limit
from grpo_workload.environments.base import Host
from grpo_workload.environments.chat_words import ChatWords
from grpo_workload.environments.pods.host import PodHost
from grpo_workload.environments.processes import Processes
from grpo_workload.environments.sessions import RankSessions
from grpo_workload.environments.words import ModelWords
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.gateway.programs import Programs
from grpo_workload.generation.gateway.server import GatewayServer
from grpo_workload.generation.limits import Limits
from grpo_workload.reporting.progress_files import write_waiting
from grpo_workload.rewards.scoring import Reward, wants_environments


def start_sessions(contract: Contract, rank: int, state_dir: Path) -> RankSessions | None:
    """Start tools and environments, or find the pods that have them, and wait until they are ready; None without any.

    How many episodes wait for a session of these pods is written into `state_dir`, which the launcher reads.

    Raises:
        ConfigError: see `RankSessions.ready`.
        EnvironmentLostError: a process ended, or did not import its module in time; or no pod was ready in time.
    """
    config = contract.config
    if not config.has_episodes:
        return None
    host: Host
    if contract.environment_pods:
        host = PodHost(contract, rank, on_wait=partial(write_waiting, state_dir, rank))
    else:
        host = Processes(config.tools, config.environments, os.environ)
    rewards = (*config.rewards, *config.evaluation_rewards)
    sessions = RankSessions(host, config, wants_reward=any(one.environment is not None for one in rewards))
    sessions.ready()
    return sessions


def make_episodes(
    config: TrainerConfig, tokenizer: Any, sessions: RankSessions | None, rewards: Sequence[Reward]
) -> Episodes | None:
    """Return what plays episodes; None for a job without any. ConfigError if the model's chat template cannot be used.

    `rewards`: all of the job, also those of evaluations.
    """
    if sessions is None:
        return None
    sessions.wants_state = wants_environments(rewards)
    limit = prompt_limit(config, config.dataset)
    limits = Limits.of(config, limit.max_tokens if limit else None)
    acts = config.tools or config.factories
    words = ModelWords(config, tokenizer, sessions.schemas.all()) if acts else None
    return Episodes(limits, sessions, words, _programs(config, tokenizer, limits))


def _programs(config: TrainerConfig, tokenizer: Any, limits: Limits) -> Programs | None:
    if len(config.factories) == len(config.environments):
        return None
    name = config.model.name or config.model.path
    assert name is not None, "RULES"
    return Programs(
        ChatWords(config, tokenizer),
        GatewayServer(config.training, name),
        max_tokens=limits.max_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
        seconds=limits.seconds,
    )
