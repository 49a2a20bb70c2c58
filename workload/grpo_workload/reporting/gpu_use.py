"""Adds up what the GPUs of all ranks and engines were used for since an attempt's first step began. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_spec.reports import GpuUse
from grpo_workload.reporting.rank_metrics import RankStep


class GpuUses:
    """The GPU seconds of an attempt. Times are those of one clock of rank 0; all ranks end a step together."""

    def __init__(self, attempt: int) -> None:
        self._use = GpuUse(attempt=attempt)
        self._since: float | None = None  # end of what was added; None before the first step begins
        self._evaluating = 0.0  # seconds since then in which ranks sampled for an evaluation
        self._ranks, self._engine_gpus = 0, 0

    def enter(self, phase: str, now: float) -> GpuUse | None:
        """Rank 0 enters a phase (see `Report.phase`). Return what is known; None before the first step has ended."""
        if self._since is None and phase in ("Preparing", "Evaluating"):  # the first step, or an evaluation before it
            self._since = now
        if self._ranks and phase in ("Done", "Stopped"):  # what came after the last step, such as its checkpoint
            seconds = self._take(now)
            return self._add(0.0, 0.0, seconds * self._ranks, seconds * self._engine_gpus)
        return self._use if self._ranks else None

    def evaluated(self, seconds: float) -> None:
        """Ranks sampled for an evaluation for so long; the next `step` counts it."""
        self._evaluating += seconds

    def step(self, now: float, ranks: Sequence[RankStep], engine_gpus: int) -> GpuUse:
        """Add a step that has ended, with all since the one before. `engine_gpus`: GPUs of engines apart from ranks.

        What a rank neither trained nor sampled, it waited. Ranks that have engines wait while those sample. Engines
        are idle while none of them has a request: each rank knows of its own, so the least that one says counts.
        """
        seconds = self._take(now)
        self._ranks, self._engine_gpus = len(ranks), engine_gpus
        own = not engine_gpus
        trained = [min(seconds, one.seconds.get("train", 0.0)) for one in ranks]
        sampled = [one.seconds.get("generate", 0.0) + self._evaluating if own else 0.0 for one in ranks]
        sampled = [min(seconds - train, sample) for train, sample in zip(trained, sampled, strict=True)]
        self._evaluating = 0.0
        idle = min([seconds, *(one.engines_idle_seconds or 0.0 for one in ranks)]) * engine_gpus
        training, sampling = sum(trained), sum(sampled)
        waiting = seconds * len(ranks) - training - sampling
        return self._add(training, sampling + seconds * engine_gpus - idle, waiting, idle)

    def _take(self, now: float) -> float:
        seconds, self._since = now - (now if self._since is None else self._since), now
        return seconds

    def _add(self, training: float, sampling: float, waiting: float, idle: float) -> GpuUse:
        use = self._use
        self._use = GpuUse(
            attempt=use.attempt,
            training=use.training + training,
            sampling=use.sampling + sampling,
            waiting=use.waiting + waiting,
            idle=use.idle + idle,
        )
        return self._use
