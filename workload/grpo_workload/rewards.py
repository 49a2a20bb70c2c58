"""Rewards of completions: built-in functions and the user's own, weighted and summed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grpo_workload.config import RewardConfig
from grpo_workload.tasks import PromptSource
from grpo_workload.types import Completion, Prompt

Values = list[float | None]
RewardFunction = Callable[[list[Prompt], list[Completion]], Values | Awaitable[Values]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its name in the metrics and its weight in the sum."""

    name: str
    weight: float
    function: RewardFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """Rewards of N completions by F functions. Plain lists, so it can be gathered as an object."""

    names: list[str]
    values: list[Values]  # [F][N]
    totals: list[float]  # [N], the weighted sum over functions that did not return None; NaN when all did

    @staticmethod
    def concat(tables: Sequence[RewardTable]) -> RewardTable:
        """One table from those of all ranks, in rank order; ranks without completions give a table with N = 0."""
        raise NotImplementedError


def build_rewards(configs: Sequence[RewardConfig], source: PromptSource) -> list[Reward]:
    """Find the functions. Raises ValueError (naming the reward) when a module or attribute is missing or does not fit the dataset."""
    raise NotImplementedError


async def score(rewards: Sequence[Reward], prompts: list[Prompt], completions: list[Completion]) -> RewardTable:
    """Score completions[i], an answer to prompts[i], with every function; all functions run at once.

    Raises:
        RewardError: a function raised, or returned something other than one number or None a completion; names the reward.
    """
    raise NotImplementedError
