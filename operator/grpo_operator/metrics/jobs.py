"""Metrics about the jobs that exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from grpo_operator.api.status import GRPOJobStatus, read_status
from grpo_operator.api.usage_status import PARTS
from grpo_spec.reasons import Reason

K = TypeVar("K", bound=Hashable)

_OF_KUBELETS = {"OOMKilled", "ContainerCannotRun", "StartError", "UnexpectedAdmissionError"}
REASONS = frozenset({str(reason) for reason in Reason} | _OF_KUBELETS)

PHASES = ("Pending", "Invalid", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """The facts about a job that metrics show."""

    namespace: str
    name: str
    phase: str
    conditions: tuple[str, ...]  # types of the conditions that are True
    restarts: int  # number of restarts, of engines too
    stuck_restarts: int  # of these, those since the last new step
    completion_time: float | None  # Unix time
    last_failure: tuple[str, float] | None  # its reason, and the Unix time
    gpu_seconds: Mapping[str, int]  # those that its pods held, by use

    @classmethod
    def read(cls, namespace: str, name: str, status: Mapping[str, Any]) -> WatchedJob:
        """Read a job as the API server returns it; its status may still be empty, or another release's."""
        known = read_status(dict(status))
        ended, failure = known.completion_time, known.last_failure
        return cls(
            namespace=namespace,
            name=name,
            phase=known.phase,
            conditions=tuple(c.type for c in known.conditions if c.status == "True"),
            restarts=known.restarts.total,
            stuck_restarts=_without_a_step(known),
            completion_time=ended.timestamp() if ended else None,
            gpu_seconds={use: known.usage.gpu_seconds.get(use, 0) for use in PARTS} if known.usage else {},
            last_failure=(label_of(failure.reason), failure.time.timestamp()) if failure else None,
        )


def label_of(reason: str) -> str:
    """Return a reason as a label. A pod may report any word; all that are not known become Other."""
    return reason if reason in REASONS else "Other"


def _without_a_step(status: GRPOJobStatus) -> int:
    recent, reached = status.recent_restarts, status.progress.step if status.progress else 0
    return 0 if recent is None or reached > recent.step else recent.total


class WatchedJobs(Collector, Generic[K]):
    """Gauges of the jobs that exist now.

    They come from the watch: they are right after a restart, and end with their job. An operator that stands by shows
    none, so that no job is counted twice.
    """

    def __init__(self) -> None:
        self._jobs: dict[K, WatchedJob] = {}
        self.shown = False

    def seen(self, key: K, job: WatchedJob) -> None:
        """Record the state of a job."""
        self._jobs[key] = job

    def gone(self, key: K) -> None:
        """Forget a job that no longer exists."""
        self._jobs.pop(key, None)

    @property
    def keys(self) -> list[K]:
        """Keys of the jobs that exist, as far as the watch has shown."""
        return list(self._jobs)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges. A namespace with a job gets all phases, so that a phase without jobs reads 0."""
        if not self.shown:
            return
        phases = Counter((job.namespace, job.phase) for job in self._jobs.values())
        jobs = GaugeMetricFamily("grpo_operator_jobs", "Number of GRPOJobs, by phase.", labels=["namespace", "phase"])
        for namespace in sorted({namespace for namespace, _ in phases}):
            for phase in PHASES:
                jobs.add_metric([namespace, phase], phases[namespace, phase])
        yield jobs
        of_job = ["namespace", "grpojob"]
        holds = GaugeMetricFamily(
            "grpo_operator_job_condition", "1 for each condition of a job that is True.", labels=[*of_job, "condition"]
        )
        restarts = GaugeMetricFamily(
            "grpo_operator_job_restarts", "Number of restarts of a job and of its engines so far.", labels=of_job
        )
        stuck = GaugeMetricFamily(
            "grpo_operator_job_restarts_without_progress",
            "Number of restarts of a job since it made its last new step.",
            labels=of_job,
        )
        completion = GaugeMetricFamily(
            "grpo_operator_job_completion_timestamp_seconds",
            "Unix time when a job ended.",
            labels=[*of_job, "phase"],
        )
        failure = GaugeMetricFamily(
            "grpo_operator_job_last_failure_timestamp_seconds",
            "Unix time of a job's last failure.",
            labels=[*of_job, "reason"],
        )
        held = GaugeMetricFamily(
            "grpo_operator_job_gpu_seconds",
            "GPU seconds that a job's pods have held, by use, as of its status.",
            labels=[*of_job, "use"],
        )
        for job in self._jobs.values():
            for use, seconds in job.gpu_seconds.items():
                held.add_metric([job.namespace, job.name, use], seconds)
            for condition in job.conditions:
                holds.add_metric([job.namespace, job.name, condition], 1)
            restarts.add_metric([job.namespace, job.name], job.restarts)
            stuck.add_metric([job.namespace, job.name], job.stuck_restarts)
            if job.completion_time is not None:
                completion.add_metric([job.namespace, job.name, job.phase], job.completion_time)
            if job.last_failure is not None:
                reason, time = job.last_failure
                failure.add_metric([job.namespace, job.name, reason], time)
        yield from (holds, restarts, stuck, completion, failure, held)
