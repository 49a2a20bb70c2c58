"""Whether Kueue lets a job run, and what the operator says and does about its Workload. Pure.

Kueue admits a Workload, or evicts it, and says so in its status. The rest is the part of whoever created it: to stop
the pods of an evicted one and then to give the quota back, and to say when pods are ready and when the job has ended
(pkg/controller/jobframework/reconciler.go). A job that is suspended has no Workload, and so no quota.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import known_time, rfc3339, seconds_between
from grpo_operator.decide import attempts
from grpo_operator.decide.conditions import find, holds, is_terminal, rests
from grpo_operator.decide.objects import condition
from grpo_operator.decide.observe import Child, Observed
from grpo_operator.layout.job import Job
from grpo_operator.layout.queueing import wanted_name
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip, mapping, mappings, number, text

REQUEUED_AT_ONCE = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which the Workload waits for quota again at once; after others Kueue says when."""


@dataclass(frozen=True, slots=True)
class QueueSteps:
    """Steps about the job's Workloads."""

    create: bool = False
    removals: tuple[Child, ...] = ()
    patches: tuple[tuple[Child, dict[str, Any]], ...] = ()  # changes of their status

    def __bool__(self) -> bool:
        return bool(self.create or self.removals or self.patches)


def is_admitted(workload: Child) -> bool:
    """Whether pods may run by this Workload."""
    deleted = "deletionTimestamp" in workload.raw["metadata"]
    active = mapping(workload.raw.get("spec")).get("active", True)
    return _holds(workload, "Admitted") and active and not deleted and not _holds(workload, "Evicted")


def find_admitted(job: Job, topology: Topology, observed: Observed) -> Child | None:
    """Return the Workload of the job as it is now, if it is admitted."""
    name = wanted_name(job, topology)
    return next((one for one in _workloads(observed) if one.name == name and is_admitted(one)), None)


def must_wait(job: Job, status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether the job must have no pods because Kueue has not admitted it, or has evicted it.

    An attempt that runs keeps the admission that it began with, whatever the job's labels say meanwhile; one that began
    without ends once the job is in a queue, as Kueue's own integrations do it.
    """
    if attempts.is_between_attempts(status):
        return job.queue is not None and job.admission is None
    if (job.queue is None and status.admission is None) or not observed.has_queues:
        return False
    uid = status.admission.uid if status.admission else ""
    return not any(one.uid == uid and is_admitted(one) for one in _workloads(observed))


def is_new(job: Job, topology: Topology, observed: Observed) -> bool:
    """Whether the job has no Workload as it is now: before it gets one, it is checked that the attempt can begin."""
    return job.queue is not None and wanted_name(job, topology) not in {one.name for one in _workloads(observed)}


def describe(job: Job, observed: Observed) -> str:
    """Say what the job waits for, in Kueue's words."""
    queue = f"LocalQueue {job.queue.name}" if job.queue else "its queue"
    for one in _workloads(observed):
        if _holds(one, "Evicted") and _holds(one, "QuotaReserved"):
            said = condition(mapping(one.raw.get("status")), "Evicted")
            return f"Kueue takes its quota back ({said.get('reason')}): {said.get('message')}"
        if not mapping(one.raw.get("spec")).get("active", True):
            return f"Workload {one.name} of {queue} is deactivated; it waits until spec.active of it is true"
        kind = "Admitted" if _holds(one, "QuotaReserved") else "QuotaReserved"
        said = condition(mapping(one.raw.get("status")), kind)
        return f"waits in {queue} as Workload {one.name}" + (f": {said['message']}" if said.get("message") else "")
    return f"waits in {queue}"


def find_steps(
    job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed, now: datetime, *, refused: bool
) -> QueueSteps:
    """Return what to do about the job's Workloads in the state that this pass writes.

    `refused`: the attempt cannot begin, so the job waits without quota.
    """
    found = _workloads(observed)
    if is_terminal(status):
        return QueueSteps(
            patches=tuple((one, _finish(one, status, now)) for one in found if not _holds(one, "Finished"))
        )
    has_pods = observed.pods or (rests(status) and observed.environment_pods)
    if not attempts.is_between_attempts(status) or has_pods:
        ready = holds(status, Condition.RUNNING)
        return QueueSteps(patches=_ready(found, now, ready=ready))
    waits = observed.has_queues and not (job.spec.suspend or refused or observed.foreign)
    wanted = wanted_name(job, topology) if waits else None
    removals = tuple(one for one in found if one.name != wanted and "deletionTimestamp" not in one.raw["metadata"])
    kept = [one for one in found if one.name == wanted]
    evicted = [one for one in kept if _holds(one, "Evicted") and _holds(one, "QuotaReserved")]
    patches = tuple((one, _give_back(one, now)) for one in evicted) or _ready(kept, now, ready=False)
    return QueueSteps(wanted is not None and not kept, removals, patches)


def _workloads(observed: Observed) -> list[Child]:
    return [child for child in observed.children if child.kind == names.QUEUE_KIND]


def _holds(workload: Child, kind: str) -> bool:
    return bool(condition(mapping(workload.raw.get("status")), kind).get("status") == "True")


def _finish(workload: Child, status: GRPOJobStatus, now: datetime) -> dict[str, Any]:
    """Return the status that says how the job ended, with which Kueue gives its quota to others."""
    done = holds(status, Condition.COMPLETE)
    said = find(status, Condition.COMPLETE if done else Condition.FAILED)
    reason, message = ("Succeeded" if done else "Failed"), (said.message if said else "")
    return {"conditions": _conditions(workload, now, ("Finished", True, reason, message))}


def _ready(found: Collection[Child], now: datetime, *, ready: bool) -> tuple[tuple[Child, dict[str, Any]], ...]:
    """Return the changes that say whether all pods are ready, as Kueue's waitForPodsReady reads it."""
    changes = []
    for one in found:
        old = condition(mapping(one.raw.get("status")), "PodsReady")
        recovers = old.get("status") == "True" or old.get("reason") in ("WaitForRecovery", "Recovered")
        if not _holds(one, "Admitted"):
            new = ("PodsReady", False, "WaitForStart", "Not all pods are ready or succeeded") if old else None
        elif ready:
            recovered = old.get("reason") in ("WaitForRecovery", "Recovered")
            reason = "Recovered" if recovered else "Started"
            new = ("PodsReady", True, reason, "All pods reached readiness and the workload is running")
        elif recovers:
            new = ("PodsReady", False, "WaitForRecovery", "At least one pod has failed, waiting for recovery")
        else:
            new = ("PodsReady", False, "WaitForStart", "Not all pods are ready or succeeded")
        if new is not None and (old.get("status"), old.get("reason")) != (str(new[1]), new[2]):
            changes.append((one, {"conditions": _conditions(one, now, new)}))
    return tuple(changes)


def _give_back(workload: Child, now: datetime) -> dict[str, Any]:
    """Return the status of an evicted Workload without its quota: no pod is left."""
    status = mapping(workload.raw.get("status"))
    said, admitted = condition(status, "Evicted"), condition(status, "Admitted")
    reason, message = text(said.get("reason")), text(said.get("message"))
    change: dict[str, Any] = {
        "admission": None,
        "conditions": _conditions(
            workload,
            now,
            ("Requeued", reason in REQUEUED_AT_ONCE, reason, message),
            ("QuotaReserved", False, "Pending", message),
            ("Admitted", False, "NoReservation", "The workload has no reservation"),
            *([("PodsReady", False, "WaitForStart", "No pod is left")] if condition(status, "PodsReady") else []),
        ),
    }
    if admitted.get("status") == "True" and (since := known_time(admitted.get("lastTransitionTime"))):
        used = max(0, round(seconds_between(since, now)))
        change["accumulatedPastExecutionTimeSeconds"] = used + number(
            status.get("accumulatedPastExecutionTimeSeconds"), 0
        )
    return change


def _conditions(workload: Child, now: datetime, *changed: tuple[str, bool, str, str]) -> list[dict[str, Any]]:
    """Return a Workload's conditions with some set: (type, whether it holds, reason, message)."""
    old = {text(one.get("type")): dict(one) for one in mappings(mapping(workload.raw.get("status")).get("conditions"))}
    for kind, value, reason, message in changed:
        before, word = old.get(kind, {}), str(value)
        old[kind] = {
            "type": kind,
            "status": word,
            "reason": reason or "Pending",
            "message": clip(message, 32768),
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == word else rfc3339(now),
            "observedGeneration": workload.raw["metadata"].get("generation", 1),
        }
    return list(old.values())
