"""Experiment trackers, through accelerate: TensorBoard, Weights & Biases, MLflow, Trackio.

Each tracker is called only in its own thread (MLflow's active run belongs to a thread), so a slow one delays no step
and a failing one does not end training. Only rank 0 starts them.
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

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    filter_trackers,
)

from grpo_spec.contract import JobRef
from grpo_spec.errors import ConfigError
from grpo_spec.schema import dump
from grpo_spec.trainer import TrainerConfig
from grpo_workload.ranks.environment import show

START_SECONDS = 90.0
"""Time limit for a tracker to start its run: a server that does not answer is a mistake in the settings."""
CLOSE_SECONDS = 60.0
"""Time limit for all trackers together to write what is pending."""
BACKLOG = 1000
"""Number of steps that may wait for a tracker."""
GLOBAL_STEP = "train/global_step"
"""X-axis of Weights & Biases, as in transformers. Its own step must not decrease, but a resumed run's step does."""
RUN_TAG = "grpo.run"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Defaults that keep the libraries from sending telemetry to their makers; the container may set others."""

_REMEDIES = {
    "tensorboard": "can the run's folder be written?",
    "wandb": "set WANDB_API_KEY (podTemplate.envFrom a Secret), or WANDB_MODE to offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server that pods reach, and its credentials (podTemplate.envFrom a Secret)",
    "trackio": "set TRACKIO_SERVER_URL to a server that pods reach, TRACKIO_SPACE_ID with HF_TOKEN, or none of them",
}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers in `training.reportTo`, for one run."""

    def __init__(self, config: TrainerConfig, job: JobRef, data_dir: Path) -> None:
        """Prepare the trackers of the run of `job`, whose folder is below `data_dir`.

        Raises ConfigError, on all ranks, if one is not installed.
        """
        self._config, self._job, self._run_dir = config, job, data_dir / job.run
        wanted = list(dict.fromkeys(config.training.report_to))
        for name in sorted(set(wanted) - {str(found) for found in filter_trackers(wanted, self._run_dir)}):
            raise ConfigError(
                f"training.reportTo: {name} is not installed in the image; add the package {_PACKAGES[name]} to it, or "
                f"leave {name} out"
            )
        self._workers: list[_Worker] = []
        self._wanted = wanted

    def start(self, step: int) -> None:
        """Start a run in each tracker, or continue the one that this job has already started, after `step` steps.

        Raises ConfigError, with the field and a remedy, if a tracker cannot.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        make: dict[str, Callable[[], GeneralTracker]] = {
            "tensorboard": lambda: self._tensorboard(step),
            "wandb": self._wandb,
            "mlflow": self._mlflow,
            "trackio": self._trackio,
        }
        self._workers = [_Worker(name, make[name]) for name in self._wanted]
        for worker in self._workers:
            if (error := worker.started(START_SECONDS)) is not None:
                self._workers.remove(worker)
                self.close()
                raise ConfigError(
                    f"training.reportTo: {worker.name} cannot start: {error}; {_REMEDIES[worker.name]}, or leave it out"
                )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics after `step` steps, without values that are not finite, to all trackers; returns at once."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for worker in self._workers:
            worker.put(step, finite)

    @property
    def failed(self) -> dict[str, float]:
        """Metrics of the run: 1 for each tracker that has failed and gets no more metrics."""
        return {f"trackers/{worker.name}/failed": 1.0 for worker in self._workers if worker.failure is not None}

    def close(self) -> None:
        """Let the trackers write what is pending, within CLOSE_SECONDS."""
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            worker.join(CLOSE_SECONDS / len(self._workers))

    def _tensorboard(self, step: int) -> GeneralTracker:
        # TensorBoard hides events of later steps, which the run wrote before it was interrupted.
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
        show("mlflow")
        import mlflow  # reads the variables above

        training = self._config.training
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or training.project
        wanted = f"tags.`{RUN_TAG}` = '{self._job.run}'"
        known = mlflow.search_runs(
            experiment_names=[project], filter_string=wanted, max_results=1, output_format="list"
        )
        run_id = known[0].info.run_id if known else None
        tracker = MLflowTracker(
            project, run_id=run_id, run_name=training.run_name or self._job.name, tags={RUN_TAG: self._job.run}
        )
        tracker.start()
        if run_id is None:  # a suspended job's parameters may change, but MLflow does not allow that
            tracker.store_init_configuration(dict(_flat(dump(self._config))))
        return tracker

    def _trackio(self) -> GeneralTracker:
        # Read when it is imported, which it is by nothing else here.
        os.environ.setdefault("TRACKIO_DIR", str(self._run_dir / "trackio"))
        training = self._config.training
        tracker = TrackioTracker(
            training.project,
            name=f"{training.run_name or self._job.name}-{self._job.uid[:8]}",  # its runs are known by their names
            resume="allow",
            config=dict(_flat(dump(self._config))),
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        tracker.start()
        return tracker


class _OwnStep(GeneralTracker):  # type: ignore[misc]  # accelerate is untyped
    """Weights & Biases with the step as a metric."""

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
    """One tracker and its thread, a daemon: a tracker that hangs does not keep the rank from ending."""

    def __init__(self, name: str, make: Callable[[], GeneralTracker]) -> None:
        self.name, self._make = name, make
        self.failure: str | None = None
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(BACKLOG)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def started(self, seconds: float) -> str | None:
        """Wait until the tracker's run has started; returns why it has not, or None."""
        return self.failure if self._started.wait(seconds) else f"nothing answered within {seconds:.0f} s"

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Queue a step for the tracker."""
        if self.failure is not None:
            return
        try:
            self._steps.put_nowait((step, metrics))
        except queue.Full:
            self._fail(f"{BACKLOG} steps wait for it")

    def finish(self) -> None:
        """Queue the end of the run."""
        if self.failure is None and not self._steps.full():
            self._steps.put_nowait(None)

    def join(self, seconds: float) -> None:
        """Wait until the tracker has ended."""
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
            logger.error("TRACKER FAILED: %s gets no more metrics, training goes on: %s", self.name, self.failure)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields with names such as `training.learningRate`; lists as JSON."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value) if isinstance(value, list) else value
