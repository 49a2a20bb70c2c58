"""The decisions: from a job, what is observed and the time, to a new status and what to do next. Pure: `now` is an argument.

A job is accepted once, runs attempt after attempt (epochs, one restart domain), and is Complete when every trainer pod's outcome is
recorded as done, or Failed when `failurePolicy` says so; either is for ever. An outcome is recorded at first sight, since a
StatefulSet's pod does not keep it (design: run once, then hold).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grpo_operator import lifecycle
from grpo_operator.attempt import is_finished, observe_pods, record
from grpo_operator.jobstatus import GRPOJobStatus
from grpo_operator.names import Condition, Reason
from grpo_operator.observe import Observed
from grpo_operator.status import Draft, holds, is_terminal, set_condition, summarise
from grpo_operator.topology import Job, Topology
from grpo_operator.verdict import Reports, find_failure, find_hang, lost, may_be_an_effect, seconds_between

POLL_SECONDS = 2.0
CALM_SECONDS = 10.0
"""The same while all pods are ready and none is being taken away: what happens to them wakes the job, and progress is written as often.
A launcher that has no step to tell of yet is asked more often."""
RETRY_SECONDS = 10.0
OBSTACLES = (Reason.UNSCHEDULABLE, Reason.CONTAINER_WAITING, Reason.WAITING_FOR_PEERS, Reason.NODE_NOT_READY)
"""Reasons of conditions that do not hold which people want to hear of."""

OVERSTAY_SECONDS = 60
"""A pod that is still there so long after its grace is deleted by force, also where nothing is known of its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a person wants to know, told once."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A pod to delete: this one, and not another of its name."""

    pod: str
    uid: str
    force: bool  # without waiting for its kubelet


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What follows from one look at a job."""

    status: GRPOJobStatus
    replicas: Literal["keep", "run", "engines", "zero"] = "keep"  # children: left alone, the spec's, engines only, none
    deletions: tuple[Deletion, ...] = ()
    delete_job: bool = False
    requeue_after: float | None = None
    events: tuple[Event, ...] = field(default=())


def plan(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed, reports: Reports, now: str) -> Plan:
    """One look at a job whose spec is valid.

    `reports` holds what launchers just said, by pod; one that did not answer is not in it, and that is never acted on.
    """
    if is_terminal(status):
        return _after_the_end(job, status, observed, now)
    draft = Draft(status, job, now)
    if status.epoch is not None:
        record(draft, topology, observed, reports)
    if status.epoch is not None and is_finished(draft.status, topology):
        lifecycle.end(draft, None)
    elif failure := lifecycle.overdue(draft):
        lifecycle.end(draft, failure)
    elif job.spec.suspend:
        lifecycle.suspend(draft, observed)
    elif lifecycle.is_between_epochs(draft.status):
        _between_epochs(draft, topology, observed)
    else:
        _look(draft, topology, observed, reports)
    new = draft.finish()
    return Plan(
        status=new,
        replicas=_replicas(new, topology, observed),
        deletions=_deletions(job, new, observed, now),
        requeue_after=_requeue(job, new, observed, reports, now),
        events=_events(status, new, job),
    )


def refuse(job_status: GRPOJobStatus, generation: int, reason: str, message: str, now: str) -> Plan:
    """A spec that cannot be run: nothing is made until it is mended."""
    status = set_condition(job_status, Condition.ACCEPTED, False, reason, message, generation=generation, now=now)
    status = summarise(status.model_copy(update={"observed_generation": generation}), "")
    known = [c.message for c in job_status.conditions if c.type == Condition.ACCEPTED]
    events = () if known == [message] else (Event(type="Warning", reason=reason, message=message),)
    return Plan(status=status, events=events, requeue_after=None if reason == Reason.INVALID_SPEC else RETRY_SECONDS)


def _after_the_end(job: Job, status: GRPOJobStatus, observed: Observed, now: str) -> Plan:
    deletions = _deletions(job, status, observed, now)
    left = POLL_SECONDS if observed.pods else None
    ttl = job.spec.ttl_seconds_after_finished
    if ttl is None or status.completion_time is None:
        return Plan(status=status, replicas="zero", deletions=deletions, requeue_after=left)
    remaining = ttl - seconds_between(status.completion_time, now)
    if remaining <= 0:
        return Plan(status=status, delete_job=True)
    return Plan(status=status, replicas="zero", deletions=deletions, requeue_after=min(remaining, left or remaining))


def _between_epochs(draft: Draft, topology: Topology, observed: Observed) -> None:
    status = draft.status
    if lifecycle.may_begin(status, observed, draft.now):
        lifecycle.accept(draft, topology)
        lifecycle.begin_epoch(draft)
    elif status.epoch is None:
        shown = ", ".join(observed.foreign[:5])
        message = f"children of an earlier job of this name are still being deleted: {shown}"
        draft.set(Condition.SCHEDULED, False, Reason.WAITING_FOR_OLD_CHILDREN, message)
    elif holds(status, Condition.RESTARTING):
        lifecycle.reconsider(draft, find_failure(status, observed, draft.job.spec.failure_policy, draft.now))


def _look(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    policy = draft.job.spec.failure_policy
    failure = find_failure(draft.status, observed, policy, draft.now)
    if failure is not None and may_be_an_effect(failure, draft.status, draft.now):
        failure = None
    failure = failure or find_hang(draft.status, topology, observed, reports, policy, draft.now)
    if failure is None:
        observe_pods(draft, topology, observed, reports)
    else:
        lifecycle.act(draft, failure)


def _replicas(status: GRPOJobStatus, topology: Topology, observed: Observed) -> Literal["keep", "run", "engines", "zero"]:
    if status.epoch is None:
        return "keep"
    if holds(status, Condition.SUSPENDED) and observed.pods.keys() & topology.trainer_pods:
        return "engines"  # ranks may need them to the end of the step after which they save
    return "zero" if is_terminal(status) or lifecycle.is_between_epochs(status) else "run"


def _deletions(job: Job, status: GRPOJobStatus, observed: Observed, now: str) -> tuple[Deletion, ...]:
    """Pods that nobody else deletes: of a lost node, of an earlier attempt, and engines to be made anew."""
    replaced = {member.uid for member in status.members if member.replacing}
    deletions = []
    for pod in observed.pods.values():
        overstays = pod.deletion_time is not None and seconds_between(pod.deletion_time, now) > OVERSTAY_SECONDS
        if overstays or (pod.deletion_time is not None and lost(pod, observed, job.spec.failure_policy, now)):
            deletions.append(Deletion(pod=pod.name, uid=pod.uid, force=True))
        elif pod.deletion_time is None and (pod.uid in replaced or pod.epoch != status.epoch):
            deletions.append(Deletion(pod=pod.name, uid=pod.uid, force=False))
    return tuple(deletions)


def _requeue(job: Job, status: GRPOJobStatus, observed: Observed, reports: Reports, now: str) -> float | None:
    if is_terminal(status):
        return POLL_SECONDS
    if holds(status, Condition.SUSPENDED):
        return CALM_SECONDS
    if status.next_restart_time is not None:
        return min(POLL_SECONDS if observed.pods else CALM_SECONDS, max(0.2, seconds_between(now, status.next_restart_time)))
    if status.epoch is None:
        return 1.0
    told = status.progress is not None and status.running_time is not None and status.progress.time >= status.running_time
    taken = any(member.outcome or member.disruption for member in status.members)
    calm = holds(status, Condition.RUNNING) and not taken and (told or not reports)
    most = CALM_SECONDS if calm else POLL_SECONDS
    if job.spec.active_deadline_seconds is not None:
        most = min(most, max(0.2, job.spec.active_deadline_seconds - lifecycle.active_seconds(status, now)))
    return most


def _events(old: GRPOJobStatus, new: GRPOJobStatus, job: Job) -> tuple[Event, ...]:
    """What changed, for `kubectl describe`: one event for each condition that came to hold, and for each new obstacle."""
    before: Mapping[str, tuple[str, str]] = {c.type: (c.status, c.reason) for c in old.conditions}
    bad_kinds = (Condition.FAILED, Condition.RESTARTING, Condition.HUNG)
    events = []
    for condition in new.conditions:
        if before.get(condition.type) == (condition.status, condition.reason):
            continue
        obstacle = condition.reason in OBSTACLES
        if condition.status == "True" or obstacle:
            bad = obstacle or condition.type in bad_kinds
            reason = condition.reason if bad else condition.type
            events.append(Event(type="Warning" if bad else "Normal", reason=reason, message=condition.message[:1024]))
    known = {member.uid for member in old.members if member.disruption}
    runs = new.epoch == old.epoch and not (is_terminal(new) or lifecycle.is_between_epochs(new))
    for member in lifecycle.leaving(new) if runs else ():
        if member.disruption is not None and member.uid not in known:
            events.append(Event(type="Warning", reason=member.disruption.reason, message=lifecycle.describe_leaving(member)[:1024]))
    failure = new.last_failure
    if failure is not None and failure != old.last_failure and not (is_terminal(new) or holds(new, Condition.RESTARTING)):
        message = f"{lifecycle.describe(failure)}; the engine is made anew, the trainer waits for it"
        events.append(Event(type="Warning", reason=Reason.ENGINE_RESTARTING, message=message[:1024]))
    if not holds(old, Condition.ACCEPTED) and holds(new, Condition.ACCEPTED) and job.spec.storage.claim_name is None:
        message = "spec.storage.claimName is not set: checkpoints are lost with the pods, and a new attempt begins at step 0"
        events.append(Event(type="Warning", reason=Reason.RESTARTS_FROM_STEP_ZERO, message=message))
    return tuple(events)
