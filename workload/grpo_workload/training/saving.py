"""Saving and publishing of checkpoints and exports. They are written while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.exports import Exports
from grpo_workload.storage.publishing import Pending
from grpo_workload.training.run import Run
from grpo_workload.training.standing import Standing

logger = logging.getLogger(__name__)


class Saving:
    """Saves a run. All methods but `end` are collective, and `is_written` is this rank's alone.

    A save copies what this rank has to write into host memory, and returns. The copies are published once all ranks
    have written theirs: at the end of a step whose `gather` says so, or before the next save. So there is never more
    than one copy, and the steps in between need no collective for it.
    """

    def __init__(self, run: Run) -> None:
        """Start a thread that has nothing to do yet."""
        self._run = run
        self._background = Background(run.policy.device)
        self._begun: list[tuple[Pending, Callable[[Path], None]]] = []
        self._step = 0  # of what is begun
        self._metrics: dict[str, float] = {}

    @property
    def is_written(self) -> bool:
        """Whether this rank has written all that is to be published; False if there is nothing to publish."""
        return bool(self._begun) and all(pending.is_written for pending, _ in self._begun)

    def turn(self, step: int, *, is_written: bool) -> dict[str, float]:
        """Publish what all ranks have written by the end of `step`, if they have; returns `metrics`."""
        self._run.checkpoints.check()
        if is_written:
            self.publish()
        if step == self._run.start.step:
            self.prepare()
        return self.metrics()

    def save(
        self, steps: range, step: int, metrics: Mapping[str, float], *, gives_up: bool, stopping: bool, is_end: bool
    ) -> None:
        """Save a checkpoint after `step`, and export the model, where they are due.

        Inside a generation there is no checkpoint: log-probabilities of the weights that it began with would be lost.

        Args:
            steps: of the generation.
            step: the one that has been taken.
            metrics: of that step.
            gives_up: too many steps were skipped, so the attempt ends with this one.
            stopping: a rank was asked to stop.
            is_end: the run ends with this step.
        """
        run, standing, waits = self._run, self._run.standing(), gives_up or stopping or is_end
        taken, is_last, every = step + 1, step + 1 == steps.stop, run.config.storage.checkpoint_every_steps
        is_due = taken // every > steps.start // every or (standing is not None and standing.saves(taken))
        if gives_up or (is_last and (waits or is_due)):
            self.checkpoint(taken, int(metrics["num_tokens"]), metrics, standing, waits=waits)
        if run.exports and is_last and (is_end or run.exports.is_due(taken, steps.start)):
            self.export(taken, metrics, waits=waits)
        if run.exports:
            run.exports.turn()

    def prepare(self) -> None:
        """Allocate host memory for copies in the background, if there will be saves for which training does not wait.

        Call it after the first step: some optimizers have no states before.
        """
        run, storage = self._run, self._run.config.storage
        intervals = [storage.checkpoint_every_steps, *([storage.export.every_steps] if storage.export else [])]
        first, last = run.start.step, run.config.training.max_steps - 1  # the last save is waited for
        if run.evaluation is None and all(last // every == first // every for every in intervals):
            return
        size = run.checkpoints.num_bytes(run.policy) + (run.exports.num_bytes(run.policy) if run.exports else 0)
        lacking = self._background.staging.reserve(size)
        if lacking and run.rank == 0:
            logger.warning(
                "training waits while checkpoints are written: %s; raise resources.limits.memory of trainer pods",
                lacking,
            )

    def checkpoint(
        self, step: int, num_tokens: int, metrics: Mapping[str, float], standing: Standing | None, *, waits: bool
    ) -> None:
        """Save the checkpoint after `step` steps; with `waits`, it is published when this returns.

        Args:
            step: number of steps taken.
            num_tokens: tokens of prompts and completions since the run began.
            metrics: of the last step, for the model's card.
            standing: says which step is the best so far, whose checkpoint stays.
            waits: for the last save of an attempt.

        Raises:
            SupersededError, NotFiniteError, StorageError: see `Checkpoints.save`; also those of a save before this one.
        """
        run = self._run
        state = SavedState(
            step=step,
            weight_version=step,
            num_tokens=num_tokens,
            world_size=run.world_size,
            zero_stage=run.config.parallelism.zero_stage,
            optimizer_dtype=run.config.parallelism.optimizer_dtype,
            lora=run.config.adapters,
            origin=run.start.origin,
            data=run.start.data,
        )
        with self._begin(step, waits) as background:
            pending = run.checkpoints.begin(
                run.policy,
                run.processing_class,
                state,
                best=None if standing is None else standing.best_step,
                card=run.card(step, metrics, has_adapters=run.config.lora is not None),
                background=background,
            )
            run.journal.begin_part()
            self._begun.append((pending, lambda folder: self._saved(step, folder)))

    def export(self, step: int, metrics: Mapping[str, float], *, waits: bool) -> None:
        """Export the model after `step` steps as `storage.export` says; otherwise like `checkpoint`."""
        run, exports = self._run, self._run.exports
        assert exports is not None
        card = run.card(step, metrics, has_adapters=exports.keeps_adapters(run.policy))
        with self._begin(step, waits) as background:
            pending = exports.begin(run.policy, run.processing_class, step, card, background)
            self._begun.append((pending, lambda folder: self._exported(exports, folder)))

    def publish(self) -> None:
        """Publish what is begun, after all ranks have written it. Errors are those of `Checkpoints.save`."""
        self._run.report.phase("Saving")
        with self._timed("time/save"):
            begun, self._begun = self._begun, []
            for pending, report in begun:
                report(pending.publish())
                self._add("time/write", pending.writer.seconds)
        self._background.staging.clear()

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call in which training waited for saving, and of writing that has ended."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def end(self) -> None:
        """End the thread. What is not published is lost; a rank that failed does not wait for it."""
        self._background.end()

    @contextmanager
    def _begin(self, step: int, waits: bool) -> Iterator[Background | None]:
        self._run.report.phase("Saving")
        if self._begun and (waits or step != self._step):
            self.publish()
        self._step = step
        waits = waits or not self._background.staging.is_reserved
        with self._timed("time/save"):
            yield None if waits else self._background
        if waits:
            self.publish()

    def _saved(self, step: int, folder: Path) -> None:
        self._run.journal.remove_lost()
        self._run.report.saved(step, self._run.checkpoints.relative(folder))

    def _exported(self, exports: Exports, folder: Path) -> None:
        exports.upload(folder)
        if self._run.rank == 0:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            self._run.report.exported(self._run.checkpoints.relative(folder), size)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - start)

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
