"""Limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_spec.trainer import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an episode."""

    max_tokens: int  # of a completion
    max_prompt_tokens: int | None  # None: no limit is known
    max_iterations: int | None
    seconds: float  # in calls
    retries: int
    truncates_prompts: bool = False  # dataset.overlongPrompts

    @staticmethod
    def of(config: TrainerConfig, max_prompt_tokens: int | None) -> Limits:
        """Return those of a job."""
        return Limits(
            max_tokens=config.training.max_completion_length,
            max_prompt_tokens=max_prompt_tokens,
            max_iterations=config.training.max_tool_calling_iterations,
            seconds=config.episodes.timeout_seconds,
            retries=config.episodes.retries,
            truncates_prompts=config.dataset.overlong_prompts == "truncate",
        )
