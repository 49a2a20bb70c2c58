"""A job as a screen shows it, from the API server's objects and the launchers' answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from grpo_cli.screen import words
from grpo_cli.screen.bill import describe_usage
from grpo_cli.screen.cures import CURES
from grpo_cli.screen.events import Happening, newest, warnings_of_pods
from grpo_cli.screen.origins import describe_site, queue_label
from grpo_cli.screen.pods import PodTrouble, leftovers, running_pods, troubles
from grpo_cli.screen.training import LauncherReport, Training, read_training
from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.site import Layers, price_of
from grpo_operator.api.status import Failure, GroupStatus, GRPOJobStatus, read_status
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide.conditions import find, holds, is_terminal, rests
from grpo_operator.decide.lifecycle import IN_STATUS, starting_since
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology, plan_topology
from grpo_spec.contract import Member

Object = Mapping[str, Any]

UNSEEN_SECONDS = 15
"""A job without a status for this long has no operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The content of one screen."""

    namespace: str
    name: str
    phase: str
    reason: str
    why: str
    cure: str
    age_seconds: float
    attempt: int | None
    restarts_total: int
    restarts: str
    next_restart: str
    gives_up: str  # when the job fails if the attempt is not Running by then
    groups: Sequence[GroupStatus]
    shapes: Mapping[str, str]  # by group: pods x GPUs
    troubles: Sequence[PodTrouble]
    rank_phases: Mapping[str, str]  # ranks by phase
    doing: str  # phase of rank 0
    training: Training | None
    bill: str  # how long it has held GPUs, and what for
    site: str  # what its site has set
    warning: str  # what is wrong with the last steps, and what to look at
    failure: Failure | None
    failure_seconds: float
    events: Sequence[Happening]
    note: str
    ended: bool


def read_job(job: Object, layers: Layers | None = None) -> Job | None:
    """Return the job with its spec as the operator reads it; None when the spec is invalid.

    `layers`: those of its site; where they are not given, those that it began with.
    """
    metadata = job["metadata"]
    stored = read_spec(job["spec"], read_status(job.get("status")), layers, queue_label(job))
    if stored.fault is not None:
        return None
    name, uid = metadata["name"], metadata["uid"]
    return Job(namespace=metadata["namespace"], name=name, uid=uid, generation=1, spec=stored.spec)


def read_topology(job: Object) -> Topology | None:
    """Return the job's pods as its spec describes them; None when the spec is invalid."""
    read = read_job(job)
    return None if read is None else plan_topology(read)


def serving_master(job: Object, pods: Sequence[Object]) -> Member | None:
    """Return rank 0's pod if it serves what the run has written.

    That of a job that has ended does not: its phase is Running until its kubelet has noticed, its launcher has exited.
    """
    if (topology := read_topology(job)) is None or is_terminal(read_status(job.get("status"))):
        return None
    master = topology.members[0]
    return master if master.pod in running_pods(pods) else None


def make_view(
    job: Object, pods: Sequence[Object], events: Sequence[Object], report: LauncherReport, now: datetime
) -> JobView:
    """Return the screen of a job."""
    metadata, status, topology = job["metadata"], read_status(job.get("status")), read_topology(job)
    age = words.since(metadata["creationTimestamp"], now) or 0.0
    phase, reason, why = _why(job, status, age)
    restarting = status.next_restart_time is not None and not is_terminal(status)
    failure = status.last_failure
    return JobView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=phase,
        reason=reason,
        why=why,
        cure=_cure(reason, phase, failure),
        age_seconds=age,
        attempt=status.attempt,
        restarts_total=status.restarts.total,
        restarts=_restarts(job, status),
        next_restart=_next_restart(status, now) if restarting else "",
        gives_up=_gives_up(job, status, now) if phase in ("Pending", "Starting", "Restarting") else "",
        groups=status.groups,
        shapes=_shapes(topology) if topology else {},
        troubles=_troubles(topology, pods, status, warnings_of_pods(events)),
        rank_phases=_by_phase(report.rank_phases),
        doing=report.progress.phase if report.progress and phase == "Running" else "",
        warning=_warning(status),
        training=read_training(job, status, report, is_running=phase == "Running"),
        bill=describe_usage(status.usage, price_of(status.site or {})),
        site=describe_site(job),
        failure=failure,
        failure_seconds=seconds_between(failure.time, now) if failure else 0.0,
        events=newest(events, metadata["name"], now),
        note=report.note if phase == "Running" else "",
        ended=is_terminal(status),
    )


def _shapes(topology: Topology) -> dict[str, str]:
    """Return the number of pods of each group, and their GPUs."""
    groups = (*topology.groups, *topology.environment_groups)
    return {one.name: f"{one.spec.replicas} x {one.gpus}" for one in groups}


def _troubles(
    topology: Topology | None, pods: Sequence[Object], status: GRPOJobStatus, warnings: Mapping[str, str]
) -> list[PodTrouble]:
    if topology is None or status.attempt is None or is_terminal(status):
        return []
    if rests(status):
        return leftovers(pods)
    if holds(status, Condition.RESTARTING):
        stay = topology.environment_pods
        return leftovers([pod for pod in pods if pod["metadata"]["name"] not in stay])
    return troubles(topology, pods, warnings)


def _why(job: Object, status: GRPOJobStatus, age: float) -> tuple[str, str, str]:
    manager = job["spec"].get("managedBy")
    if manager not in (None, names.CONTROLLER):
        return "Unmanaged", "ManagedBy", f"spec.managedBy is {manager}: this operator ignores the job"
    if not status.conditions:
        if age < UNSEEN_SECONDS:
            return "Pending", "", "the operator has not processed it yet"
        waited = words.duration(age)
        return (
            "Pending",
            "NoOperator",
            f"no operator has processed this job for {waited}: does one run? "
            f"kubectl get pods -A -l app.kubernetes.io/name={names.MANAGER}",
        )
    # The failure is on the same screen.
    why = status.summary.message.replace(IN_STATUS, "")  # the failure is on the same screen
    if status.observed_generation < job["metadata"].get("generation", 0):
        why = f"{why} (the operator has not processed the newest change of the spec yet)"
    return status.phase, status.summary.reason, why


def _cure(reason: str, phase: str, failure: Failure | None) -> str:
    if phase in ("Failed", "Restarting") and failure:
        return CURES.get(failure.reason, "").replace("NODE", failure.node or "NODE")
    return CURES.get(reason, "")


def _warning(status: GRPOJobStatus) -> str:
    degraded = find(status, Condition.DEGRADED)
    if degraded is None or degraded.status != "True":
        return ""
    cure = CURES.get(degraded.reason)
    end = "" if degraded.message.endswith("?") else "."
    return f"{degraded.reason}: {degraded.message}" + (f"{end} To do: {cure}" if cure else "")


def _restarts(job: Object, status: GRPOJobStatus) -> str:
    if not status.restarts.total:
        return ""
    most = read_spec(job["spec"], status).spec.failure_policy.max_restarts
    free = status.restarts.total - status.restarts.counted
    return f"{status.restarts.counted} of at most {most}" + (
        f", and {free} that {'does' if free == 1 else 'do'} not count" if free else ""
    )


def _next_restart(status: GRPOJobStatus, now: datetime) -> str:
    assert status.next_restart_time is not None
    wait = seconds_between(now, status.next_restart_time)
    return (
        f"not before {rfc3339(status.next_restart_time)}, in {words.duration(wait)}"
        if wait > 0
        else "when the last attempt has no pod left"
    )


def _gives_up(job: Object, status: GRPOJobStatus, now: datetime) -> str:
    if (since := starting_since(status)) is None:
        return ""
    limit = read_spec(job["spec"], status).spec.startup_deadline_seconds
    at = after(since, limit)
    left = seconds_between(now, at)
    return f"at {rfc3339(at)}, in {words.duration(left)}, if not all pods are ready by then (startupDeadlineSeconds)"


def _by_phase(rank_phases: Mapping[int, str]) -> dict[str, str]:
    phases: dict[str, list[int]] = {}
    for rank, phase in rank_phases.items():
        phases.setdefault(phase, []).append(rank)
    return {phase: words.ranges(ranks) for phase, ranks in sorted(phases.items(), key=lambda each: len(each[1]))}
