"""The jobs that exist, as metrics tell of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

K = TypeVar("K", bound=Hashable)

PHASES = ("Pending", "Invalid", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """What metrics tell of a job that exists."""

    namespace: str
    name: str
    phase: str
    conditions: tuple[str, ...]  # that hold
    restarts: int
    completion_time: float | None  # seconds since the epoch

    @classmethod
    def read(cls, namespace: str, name: str, status: Mapping[str, Any]) -> WatchedJob:
        """A job as the API server has it; its status may be empty still."""
        ended = status.get("completionTime")
        return cls(
            namespace=namespace,
            name=name,
            phase=status.get("phase") or "Pending",
            conditions=tuple(c["type"] for c in status.get("conditions") or () if c["status"] == "True"),
            restarts=(status.get("restarts") or {}).get("total", 0),
            completion_time=datetime.fromisoformat(ended).timestamp() if ended else None,
        )


class WatchedJobs(Collector, Generic[K]):
    """Gauges of the jobs that exist now: right after a restart too, since they come from the watch, and gone with their job."""

    def __init__(self) -> None:
        self._jobs: dict[K, WatchedJob] = {}

    def seen(self, key: K, job: WatchedJob) -> None:
        """A job is there, in this state."""
        self._jobs[key] = job

    def gone(self, key: K) -> None:
        """A job is no longer there."""
        self._jobs.pop(key, None)

    @property
    def keys(self) -> list[K]:
        """Keys of the jobs that are there, as far as is known."""
        return list(self._jobs)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector. All phases of each namespace that has a job, so that what left a phase is seen to be 0."""
        phases = Counter((job.namespace, job.phase) for job in self._jobs.values())
        jobs = GaugeMetricFamily("grpo_operator_jobs", "GRPOJobs that exist, by phase.", labels=["namespace", "phase"])
        for namespace in sorted({namespace for namespace, _ in phases}):
            for phase in PHASES:
                jobs.add_metric([namespace, phase], phases[namespace, phase])
        yield jobs
        of_job = ["namespace", "grpojob"]
        holds = GaugeMetricFamily("grpo_operator_job_condition", "1 for each condition of a job that holds.", labels=[*of_job, "condition"])
        restarts = GaugeMetricFamily("grpo_operator_job_restarts", "Restarts of a job so far, of engines too.", labels=of_job)
        completion = GaugeMetricFamily(
            "grpo_operator_job_completion_timestamp_seconds", "When a job that has ended did, in Unix time.", labels=[*of_job, "phase"]
        )
        for job in self._jobs.values():
            for condition in job.conditions:
                holds.add_metric([job.namespace, job.name, condition], 1)
            restarts.add_metric([job.namespace, job.name], job.restarts)
            if job.completion_time is not None:
                completion.add_metric([job.namespace, job.name, job.phase], job.completion_time)
        yield from (holds, restarts, completion)
