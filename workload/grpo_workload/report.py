"""What a run leaves behind for people and for the launcher, while it goes: curves, samples of its text, and its progress."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from grpo_workload.contract import Progress
from grpo_workload.metrics import MetricsLog
from grpo_workload.progress import write_phase, write_progress, write_rank_step
from grpo_workload.rank_metrics import RankStep
from grpo_workload.types import Sample

if TYPE_CHECKING:
    from grpo_workload.tracking import Trackers

SAMPLES_PER_STEP = 4
"""Prompts of which one completion a step is kept for people to read."""
STEPS_TIMED = 20
"""Last steps whose median duration is told."""

logger = logging.getLogger(__name__)


class Report(Protocol):
    """What the loop tells."""

    def phase(self, phase: str) -> None:
        """The rank enters a phase of a step: Preparing, Generating, Rewarding, Journalling, Gathering, Training, Syncing, Agreeing, Saving.

        Before the loop it is Starting (Python and its imports) and Loading, after it Done or Stopped. Preparing is waiting for the step's
        prompts, Gathering for the rewards of all ranks, Agreeing for all to have ended the step.
        """
        ...

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample], ranks: Sequence[RankStep]) -> None:
        """Step number `step` (from 0) is finished: its metrics, this rank's samples, and every rank's part in it."""
        ...

    def saved(self, step: int, folder: Path) -> None:
        """The checkpoint of `step` steps was written to `folder`, relative to the data folder."""
        ...

    def close(self) -> None:
        """Nothing more to tell."""
        ...


class RankReport:
    """For ranks other than 0: what they would tell is the same, except which phase they are in, and their own part in a step."""

    def __init__(self, state_dir: Path, rank: int) -> None:
        self._state_dir, self._rank = state_dir, rank

    def phase(self, phase: str) -> None:
        """See `Report.phase`."""
        write_phase(self._state_dir, self._rank, phase)

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample], ranks: Sequence[RankStep]) -> None:
        """See `Report.step`."""
        _tell_own_step(self._state_dir, self._rank, ranks)

    def saved(self, step: int, folder: Path) -> None: ...

    def close(self) -> None: ...


class RunReport:
    """`metrics.jsonl`, `ranks.jsonl` and `completions.jsonl` in the run's folder, trackers, the progress file at each phase and step."""

    def __init__(self, run_dir: Path, state_dir: Path, *, total_steps: int, step: int, trackers: Trackers | None = None) -> None:
        """A run of `total_steps` that stands at `step`: lines of later steps, which an interrupted run has left, are dropped.

        `trackers` have been started.
        """
        self._state_dir, self._trackers = state_dir, trackers
        self._metrics = MetricsLog(run_dir / "metrics.jsonl", resume_step=step)
        self._ranks = MetricsLog(run_dir / "ranks.jsonl", resume_step=step)
        self._completions = MetricsLog(run_dir / "completions.jsonl", resume_step=step)
        self._progress = Progress(step=step, total_steps=total_steps, phase="Loading", weight_version=step)
        self._last_step = time.monotonic()
        self._durations: deque[float] = deque(maxlen=STEPS_TIMED)

    def phase(self, phase: str) -> None:
        """See `Report.phase`."""
        write_phase(self._state_dir, 0, phase)
        self._tell(phase=phase, age_seconds=time.monotonic() - self._last_step)

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample], ranks: Sequence[RankStep]) -> None:
        """See `Report.step`."""
        self._metrics.write(step, metrics)
        self._ranks.write(step, {"ranks": [rank.as_json() for rank in ranks]})
        of_each_prompt = {sample.prompt.index: sample for sample in reversed(samples)}
        for sample in list(reversed(of_each_prompt.values()))[:SAMPLES_PER_STEP]:
            text = {
                "prompt": sample.prompt.text,
                "completion": sample.completion.text,
                "reward": sample.reward,
                "advantage": sample.advantage,
            }
            self._completions.write(step, text)
        _tell_own_step(self._state_dir, 0, ranks)
        if self._trackers is not None:
            self._trackers.log(step + 1, metrics)
            metrics = {**metrics, **self._trackers.failed}
        logger.info("step %d: reward %.3f, %.2f s", step + 1, metrics["reward"], metrics["step_time"])
        now = time.monotonic()
        # From end to end: what a step takes beside its own parts, such as saving, is no sign of a hang either.
        self._durations.append(now - self._last_step)
        self._last_step = now
        self._tell(
            step=step + 1,
            step_seconds=median(self._durations),
            reward=metrics["reward"],
            metrics=dict(metrics),
            tokens_per_second=metrics["tokens_per_second"],
            weight_version=step + 1,
            age_seconds=0.0,
        )

    def saved(self, step: int, folder: Path) -> None:
        """See `Report.saved`."""
        self._tell(checkpoint_step=step, checkpoint=str(folder))

    def close(self) -> None:
        """See `Report.close`."""
        self._metrics.close()
        self._ranks.close()
        self._completions.close()
        if self._trackers is not None:
            self._trackers.close()

    def _tell(self, **changes: object) -> None:
        self._progress = self._progress.model_copy(update=changes)
        write_progress(self._state_dir, self._progress)


def _tell_own_step(state_dir: Path, rank: int, ranks: Sequence[RankStep]) -> None:
    for own in (one for one in ranks if one.rank == rank):
        write_rank_step(state_dir, rank, own.as_json())
