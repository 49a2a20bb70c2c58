"""Whether steps are long because episodes wait for sessions of environment pods: pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from grpo_spec.trainer import TrainerConfig

ROUNDS = 5
"""Rounds whose median counts, so that one pod that begins again is no reason. A round is the steps of a generation."""
DOMINATES = 0.25
"""Share of a step from which on waiting for sessions is worth a change."""


class SessionAdvisor:
    """Follows the steps of an attempt, and says after each whether there are too few sessions."""

    def __init__(self, config: TrainerConfig) -> None:
        self._length = config.training.steps_per_push
        self._episodes = config.training.prompts_per_step * config.training.num_generations
        self._round: list[tuple[float, float]] = []
        self._rounds: deque[tuple[float, float]] = deque(maxlen=ROUNDS)

    def add(self, metrics: Mapping[str, float], seconds: float) -> str | None:
        """Add a step that has ended, and return what to change, as a sentence; None if nothing.

        Args:
            metrics: metrics of the step.
            seconds: time since the step before it ended.
        """
        # Episodes of later steps may wait while ranks train: only what ranks wait for makes a step longer.
        waited = min(metrics.get("episodes/wait_seconds/mean", 0.0), metrics["ranks/generate_seconds/max"])
        self._round.append((waited, seconds))
        if len(self._round) == self._length:
            self._rounds.append((math.fsum(one for one, _ in self._round), math.fsum(one for _, one in self._round)))
            self._round = []
        if len(self._rounds) < ROUNDS or median(waits / whole for waits, whole in self._rounds) < DOMINATES:
            return None
        waits, whole = (median(column) for column in zip(*self._rounds, strict=True))
        what = "step" if self._length == 1 else "generation"
        return (
            f"episodes wait {waits:.1f} s of a {what}'s {whole:.1f} s for a session of an environment pod: raise "
            "spec.environmentPods.groups[].replicas, or sessions where pods have memory for more, while "
            f"suspended ({self._episodes} episodes of a step at once need as many)"
        )
