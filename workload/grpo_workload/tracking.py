"""Experiment trackers, through accelerate: TensorBoard, Weights & Biases, MLflow.

Each has a thread of its own, in which alone it is called (MLflow's active run belongs to a thread): one that is slow holds no step up, and
one that fails ends no training. Only rank 0 starts them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker, filter_trackers

from grpo_workload.config import TrainerConfig
from grpo_workload.contract import JobRef
from grpo_workload.section import dump

START_SECONDS = 90.0
"""In which a tracker must have begun its run: a server that does not answer is a mistake in the settings."""
CLOSE_SECONDS = 60.0
"""In which all trackers together must have written what is left."""
BACKLOG = 1000
"""Steps that may wait for a tracker."""
GLOBAL_STEP = "train/global_step"
"""Weights & Biases' x-axis, as transformers has it: its own step may not go back, which a run that goes on from a checkpoint does."""
RUN_TAG = "grpo.run"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Unless the container says otherwise, libraries tell the tracker alone of the run, and not their makers."""

_CURES = {
    "tensorboard": "can the run's folder be written?",
    "wandb": "set WANDB_API_KEY (podTemplate.envFrom a Secret), or WANDB_MODE to offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server that the pods reach, with its credentials (podTemplate.envFrom a Secret)",
}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}

logger = logging.getLogger(__name__)


class Trackers:
    """What `training.reportTo` names, for one run."""

    def __init__(self, config: TrainerConfig, job: JobRef, data_dir: Path) -> None:
        """Trackers of the run of `job` below `data_dir`. Raises ValueError for one that is not installed, which all ranks see alike."""
        self._config, self._job, self._run_dir = config, job, data_dir / job.run
        wanted = list(dict.fromkeys(config.training.report_to))
        for name in sorted(set(wanted) - {str(found) for found in filter_trackers(wanted, self._run_dir)}):
            raise ValueError(
                f"training.reportTo: {name} is not installed in the image; add the package {_PACKAGES[name]} to it, or leave {name} out"
            )
        self._workers: list[_Worker] = []
        self._wanted = wanted

    def start(self, step: int) -> None:
        """Begin a run, or go on with the one that this job has begun before, after `step` steps.

        Raises ValueError, with the field and a cure, for one that cannot.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        make: dict[str, Callable[[], GeneralTracker]] = {
            "tensorboard": lambda: self._tensorboard(step),
            "wandb": self._wandb,
            "mlflow": self._mlflow,
        }
        self._workers = [_Worker(name, make[name]) for name in self._wanted]
        for worker in self._workers:
            if (error := worker.started(START_SECONDS)) is not None:
                self._workers.remove(worker)
                self.close()
                raise ValueError(f"training.reportTo: {worker.name} does not begin: {error}; {_CURES[worker.name]}, or leave it out")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all trackers the metrics after `step` steps; returns at once. What is not finite is left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for worker in self._workers:
            worker.put(step, finite)

    @property
    def failed(self) -> dict[str, float]:
        """1 for each tracker that has failed and is told no more, as metrics of the run."""
        return {f"trackers/{worker.name}/failed": 1.0 for worker in self._workers if worker.failure is not None}

    def close(self) -> None:
        """Let trackers write what is left, for so long as they may."""
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            worker.join(CLOSE_SECONDS / len(self._workers))

    def _tensorboard(self, step: int) -> GeneralTracker:
        # Events of later steps, which an interrupted run has left, are hidden.
        tracker = TensorBoardTracker("tensorboard", self._run_dir, purge_step=step + 1)
        tracker.start()
        tracker.log({"config": f"```\n{json.dumps(dump(self._config), indent=1)}\n```"}, step=step)
        return tracker

    def _wandb(self) -> GeneralTracker:
        training = self._config.training
        tracker = WandBTracker(
            os.environ.get("WANDB_PROJECT") or training.project,
            name=training.run_name or self._job.name,
            id=self._job.uid,
            resume="allow",
            dir=str(self._run_dir),
        )
        tracker.start()
        tracker.store_init_configuration(dict(_flat(dump(self._config))))
        tracker.run.define_metric(GLOBAL_STEP)
        tracker.run.define_metric("*", step_metric=GLOBAL_STEP)
        return _OwnStep(tracker)

    def _mlflow(self) -> GeneralTracker:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_TRACKING_URI"] = (self._run_dir / "mlruns").as_uri()
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        import mlflow  # reads the variables

        training = self._config.training
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or training.project
        wanted = f"tags.`{RUN_TAG}` = '{self._job.run}'"
        known = mlflow.search_runs(experiment_names=[project], filter_string=wanted, max_results=1, output_format="list")
        run_id = known[0].info.run_id if known else None
        tracker = MLflowTracker(project, run_id=run_id, run_name=training.run_name or self._job.name, tags={RUN_TAG: self._job.run})
        tracker.start()
        if run_id is None:  # MLflow's parameters cannot change, and a suspended job's may
            tracker.store_init_configuration(dict(_flat(dump(self._config))))
        return tracker


class _OwnStep(GeneralTracker):  # type: ignore[misc]  # accelerate is untyped
    """Weights & Biases told of the step as of a metric."""

    name, requires_logging_directory = "wandb", False

    def __init__(self, inner: WandBTracker) -> None:
        super().__init__()
        self._inner = inner

    @property
    def tracker(self) -> Any:
        return self._inner.tracker

    def log(self, values: Mapping[str, float], step: int | None = None, **more: Any) -> None:
        self._inner.log({**values, GLOBAL_STEP: step}, **more)

    def finish(self) -> None:
        self._inner.finish()


class _Worker:
    """One tracker and the thread in which it lives; a daemon, so that one that hangs keeps no rank from its end."""

    def __init__(self, name: str, make: Callable[[], GeneralTracker]) -> None:
        self.name, self._make = name, make
        self.failure: str | None = None
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(BACKLOG)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def started(self, seconds: float) -> str | None:
        """Wait for the tracker's run to begin; why it has not."""
        return self.failure if self._started.wait(seconds) else f"nothing answered within {seconds:.0f} s"

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Let the tracker log a step when it comes to it."""
        if self.failure is not None:
            return
        try:
            self._steps.put_nowait((step, metrics))
        except queue.Full:
            self._fail(f"{BACKLOG} steps wait for it")

    def finish(self) -> None:
        """Nothing more will be put."""
        if self.failure is None and not self._steps.full():
            self._steps.put_nowait(None)

    def join(self, seconds: float) -> None:
        """Wait for the tracker's end."""
        self._thread.join(seconds)
        if self._thread.is_alive() and self.failure is None:
            self._fail(f"it was not done {seconds:.0f} s after the last step")

    def _work(self) -> None:
        try:
            tracker = self._make()
            self._started.set()
            while self.failure is None and (item := self._steps.get()) is not None:
                tracker.log(item[1], step=item[0])
            tracker.finish()
        except Exception as error:  # whatever a tracker's library raises: training does not depend on it
            self._fail(f"{type(error).__name__}: {error}")
            self._started.set()

    def _fail(self, why: str) -> None:
        self.failure = " ".join(why.split())[:1000]
        if self._started.is_set():
            logger.error("TRACKER FAILED: %s is told no more, training goes on: %s", self.name, self.failure)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested sections as `training.learningRate`; lists as JSON."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value) if isinstance(value, list) else value
