"""Reports of a rank to people and to its launcher during a run: metrics, samples of its text, its progress."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from grpo_spec.reports import EvaluationProgress, ExportProgress, Progress, RunWarning
from grpo_workload.algorithm.samples import Sample
from grpo_workload.reporting.gpu_use import GpuUses
from grpo_workload.reporting.jsonl import EVALUATIONS, StepLog
from grpo_workload.reporting.progress_files import write_phase, write_progress, write_rank_step
from grpo_workload.reporting.rank_metrics import RankStep
from grpo_workload.reporting.transcript import readable

if TYPE_CHECKING:
    from grpo_workload.reporting.trackers import Trackers

STEPS_TIMED = 20
"""Number of last steps whose median duration is reported."""

logger = logging.getLogger(__name__)


class Report(Protocol):
    """The receiver of the loop's reports."""

    def phase(self, phase: str) -> None:
        """Report that the rank enters a phase.

        Phases of a step: Preparing (waiting for its prompts), Generating, Rewarding, Gathering (waiting for the rewards
        of all ranks), Training, Journalling, Syncing, Agreeing (waiting for all ranks to end the step), Evaluating,
        Saving. Before the loop: Starting (Python and its imports), Loading, Measuring (the memory of micro-batches).
        After it: Done or Stopped.
        """
        ...

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[Sample],
        ranks: Sequence[RankStep],
        warnings: Sequence[RunWarning] = (),
        advice: str | None = None,
        engine_gpus: int = 0,
    ) -> None:
        """Report that step number `step` (from 0) has ended: its metrics, this rank's samples, every rank's part,
        what is wrong with the last steps, what would make steps faster, and how many GPUs the engines have that sampled
        beside the ranks.
        """
        ...

    def evaluated(self, step: int, metrics: Mapping[str, float], standing: EvaluationProgress) -> None:
        """Report an evaluation that was made after `step` steps, before that step is reported."""
        ...

    def pushed(self, version: int) -> None:
        """Report that generation uses the weights of `version`."""
        ...

    def saved(self, step: int, folder: Path) -> None:
        """Report that the checkpoint of `step` steps is in `folder`, relative to the data folder."""
        ...

    def exported(self, folder: Path, size: int) -> None:
        """Report that an export of `size` bytes is in `folder`, relative to the data folder."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class RankReport:
    """Report of a rank other than 0: only its phase and its own part of a step; rank 0 reports what all share."""

    def __init__(self, state_dir: Path, rank: int) -> None:
        self._state_dir, self._rank = state_dir, rank

    def phase(self, phase: str) -> None:
        """See `Report.phase`."""
        write_phase(self._state_dir, self._rank, phase)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[Sample],
        ranks: Sequence[RankStep],
        warnings: Sequence[RunWarning] = (),
        advice: str | None = None,
        engine_gpus: int = 0,
    ) -> None:
        """See `Report.step`."""
        _write_own_step(self._state_dir, self._rank, ranks)

    def evaluated(self, step: int, metrics: Mapping[str, float], standing: EvaluationProgress) -> None: ...

    def pushed(self, version: int) -> None: ...

    def saved(self, step: int, folder: Path) -> None: ...

    def exported(self, folder: Path, size: int) -> None: ...

    def close(self) -> None: ...


class RunReport:
    """Report of rank 0: the run's metrics.jsonl, ranks.jsonl, completions.jsonl and evaluations.jsonl, the trackers,
    the progress file.
    """

    def __init__(
        self,
        run_dir: Path,
        state_dir: Path,
        *,
        total_steps: int,
        step: int,
        attempt: int = 0,
        steps_per_push: int = 1,
        trackers: Trackers | None = None,
        evaluation: EvaluationProgress | None = None,
    ) -> None:
        """Open the files of a run that starts at `step`; lines of later steps, from before a restart, are dropped.

        Of `steps_per_push` steps, only the first samples. `trackers` are already started. `evaluation` is the last
        one that an earlier attempt has made.
        """
        self._state_dir, self._trackers = state_dir, trackers
        self._metrics = StepLog(run_dir / "metrics.jsonl", resume_step=step)
        self._ranks = StepLog(run_dir / "ranks.jsonl", resume_step=step)
        self._completions = StepLog(run_dir / "completions.jsonl", resume_step=step)
        self._evaluations = StepLog(run_dir / EVALUATIONS, resume_step=step + 1)
        self._evaluated: dict[int, Mapping[str, float]] = {}  # the last evaluation, by the number of steps
        self._progress = Progress(
            step=step, total_steps=total_steps, phase="Loading", weight_version=step, evaluation=evaluation
        )
        self._ends = deque([time.monotonic()], maxlen=steps_per_push)  # of the last steps
        self._durations: deque[float] = deque(maxlen=STEPS_TIMED)
        self._gpu_uses = GpuUses(attempt)

    def phase(self, phase: str) -> None:
        """See `Report.phase`."""
        write_phase(self._state_dir, 0, phase)
        now = time.monotonic()
        self._update(phase=phase, age_seconds=now - self._ends[-1], gpu_use=self._gpu_uses.enter(phase, now))

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[Sample],
        ranks: Sequence[RankStep],
        warnings: Sequence[RunWarning] = (),
        advice: str | None = None,
        engine_gpus: int = 0,
    ) -> None:
        """See `Report.step`."""
        self._metrics.write(step, {**metrics, **self._evaluated.get(step + 1, {})})
        self._ranks.write(step, {"ranks": [rank.as_json() for rank in ranks]})
        for line in readable(samples):
            self._completions.write(step, line)
        _write_own_step(self._state_dir, 0, ranks)
        if self._trackers is not None:
            self._trackers.log(step + 1, metrics)
            metrics = {**metrics, **self._trackers.failed}
        known = {warning.reason for warning in self._progress.warnings}
        for warning in warnings:
            if warning.reason not in known:
                logger.warning("step %d: %s: %s", step + 1, warning.reason, warning.message)
        if metrics.get("skipped"):
            logger.warning("STEP SKIPPED: step %d: its loss or gradients are not finite; no weight changed", step + 1)
        logger.info("step %d: reward %.3f, %.2f s", step + 1, metrics["reward"], metrics["step_time"])
        now = time.monotonic()
        # Measured from end to end, so that saving a checkpoint between steps does not look like a hang; and over all
        # steps that one generation serves, of which the first takes the time for sampling.
        self._durations.append((now - self._ends[0]) / len(self._ends))
        self._ends.append(now)
        self._update(
            step=step + 1,
            step_seconds=median(self._durations),
            reward=metrics["reward"],
            metrics=dict(metrics),
            warnings=tuple(warnings),
            advice=advice,
            tokens_per_second=metrics["tokens_per_second"],
            gpu_use=self._gpu_uses.step(now, ranks, engine_gpus),
            age_seconds=0.0,
        )

    def evaluated(self, step: int, metrics: Mapping[str, float], standing: EvaluationProgress) -> None:
        """See `Report.evaluated`."""
        self._evaluations.write(step, metrics)
        self._evaluated = {step: metrics}
        if self._trackers is not None:
            self._trackers.log(step, metrics)
        reward, seconds = metrics["eval/reward"], metrics["time/evaluate"]
        self._gpu_uses.evaluated(seconds)
        self._update(evaluation=standing)
        logger.info("evaluation after %d steps: reward %.3f, %.2f s", step, reward, seconds)

    def pushed(self, version: int) -> None:
        """See `Report.pushed`."""
        self._update(weight_version=version)

    def saved(self, step: int, folder: Path) -> None:
        """See `Report.saved`."""
        self._update(checkpoint_step=step, checkpoint=str(folder))

    def exported(self, folder: Path, size: int) -> None:
        """See `Report.exported`."""
        self._update(export=ExportProgress(path=str(folder), bytes=size))

    def close(self) -> None:
        """See `Report.close`."""
        self._metrics.close()
        self._ranks.close()
        self._completions.close()
        self._evaluations.close()
        if self._trackers is not None:
            self._trackers.close()

    def _update(self, **changes: object) -> None:
        self._progress = self._progress.model_copy(update=changes)
        write_progress(self._state_dir, self._progress)


def _write_own_step(state_dir: Path, rank: int, ranks: Sequence[RankStep]) -> None:
    for own in (one for one in ranks if one.rank == rank):
        write_rank_step(state_dir, rank, own.as_json())
