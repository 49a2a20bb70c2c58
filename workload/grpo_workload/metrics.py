"""What a step reports, under TRL's names, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from grpo_workload.rewards import RewardTable


class MetricsLog:
    """One JSON object a step, appended to a file."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open `path`, dropping lines of steps >= `resume_step`, so that a resumed run continues the curve of its checkpoint."""
        raise NotImplementedError

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step; in the file as soon as this returns. NaN and infinity become null."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        raise NotImplementedError


def summarise(
    table: RewardTable,
    *,
    num_generations: int,
    scale_rewards: Literal["group", "batch", "none"],
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    truncated: Sequence[bool],
    step_time: float,
    num_tokens_before: int = 0,
) -> dict[str, float]:
    """Metrics of a step over all ranks: rewards, lengths, tokens, speed.

    All sequences hold one entry a completion of the whole step (gather them over ranks first). `step_time` in seconds;
    `num_tokens_before` is `num_tokens` of the step before. The caller adds loss, grad_norm, learning_rate and `loss.token_means`.
    """
    raise NotImplementedError
