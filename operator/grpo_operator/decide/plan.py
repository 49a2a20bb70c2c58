"""Plan one pass over a job: spec, status, observed pods and time give a new status and what to do. Pure.

A job runs attempt after attempt; all its pods restart together. It is Complete once every trainer pod is recorded as
done, or Failed when `failurePolicy` says so; both are permanent. A pod's outcome is recorded as soon as it is seen,
because the kubelet restarts the container and soon overwrites it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import seconds_between
from grpo_operator.decide import attempts, downloading, environment_pods, in_place, lifecycle, queueing, restarts
from grpo_operator.decide.blame import (
    EFFECTS,
    Reports,
    find_failure,
    find_hang,
    find_spare_failures,
    may_be_an_effect,
    of_silent_pod,
)
from grpo_operator.decide.conditions import Draft, find, holds, is_terminal, keeps_pods, rests
from grpo_operator.decide.deletions import (
    Deletion,
    describe_held,
    describe_held_children,
    describe_orphan,
    find_deletions,
    find_left,
)
from grpo_operator.decide.downloading import DownloadSteps
from grpo_operator.decide.events import Event, events_between
from grpo_operator.decide.next_pass import POLL_SECONDS, seconds_to_next
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.placement import find_limits, find_placement_timeout
from grpo_operator.decide.queueing import QueueSteps
from grpo_operator.decide.record import is_finished, observe_groups, record
from grpo_operator.decide.running import observe_pods
from grpo_operator.decide.scaling import Scale, find_scale
from grpo_operator.decide.usage import with_usage
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.reasons import Reason


class Mode(StrEnum):
    """The pods of the job that should exist."""

    KEEP = "keep"  # change no child: no attempt has begun, the next one is to begin in the same pods, or the job ends
    RUN = "run"  # all pods of the spec
    ENGINES_ONLY = "engines-only"  # trainer pods end; others stay until the last trainer pod is gone
    ENVIRONMENTS_ONLY = "environments-only"  # the pods of the attempt end, and the next one finds its environments
    STOPPED = "stopped"  # no pod


class Obstacle(NamedTuple):
    """An obstacle to an attempt."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of one pass."""

    status: GRPOJobStatus
    mode: Mode = Mode.KEEP
    limits: Mapping[str, int] = field(default_factory=dict)  # pods of StatefulSets that wait until others have nodes
    deletions: tuple[Deletion, ...] = ()
    delete_job: bool = False
    scale: Scale | None = None  # to write into the spec
    queue: QueueSteps = field(default_factory=QueueSteps)
    download: DownloadSteps = field(default_factory=DownloadSteps)
    renewals: tuple[tuple[str, str], ...] = ()  # name and UID of pods whose kubelets have to renew the contract
    requeue_after: float | None = None  # seconds until the next pass; None: only when something changes
    events: tuple[Event, ...] = ()


def plan(
    job: Job,
    topology: Topology,
    status: GRPOJobStatus,
    observed: Observed,
    reports: Reports,
    now: datetime,
    obstacle: Obstacle | None = None,
    least: float = 0.0,
) -> Plan:
    """Plan one pass over a job.

    `reports` holds what launchers just answered, by pod. A launcher that did not answer is missing from it; that alone
    causes no action. `obstacle` says why the attempt that is about to begin cannot. A spec that cannot run is refused
    before the first attempt, and before each later one; an attempt that runs is never refused. `least`: see
    `seconds_to_next`.
    """
    if is_terminal(status):
        return _after_the_end(job, topology, status, observed, now)
    draft = Draft(status, job, now)
    begins = attempts.is_about_to_begin(job, status, observed, now)
    if begins or status.attempt is None:
        if job.fault is not None:
            obstacle = Obstacle(Reason.INVALID_SPEC, job.fault)
        elif job.refused is not None:
            obstacle = Obstacle(Reason.REFUSED_BY_SITE, job.refused)
    if status.attempt is not None:
        record(draft, topology, observed, reports)
    if status.attempt is not None and is_finished(draft.status, topology):
        lifecycle.end(draft, None)
    elif failure := lifecycle.passed_deadline(draft):
        lifecycle.end(draft, failure)
    elif obstacle is not None:
        draft.set(Condition.ACCEPTED, False, obstacle.reason, obstacle.message)
        if keeps_pods(draft.status):  # a job that cannot begin is to hold no GPU
            restarts.recreate(draft, obstacle.message)
    elif job.spec.suspend:
        lifecycle.suspend(draft, find_left(observed, now))
    elif queueing.must_wait(job, status, observed):
        _wait_in_queue(draft, topology, observed)
    elif not (observed.foreign or downloading.is_done(job, status, observed)):
        _download(draft, topology, observed, reports)
    elif begins:
        attempts.begin(draft, topology)
        observe_groups(draft, topology, observed)
    elif attempts.is_between_attempts(draft.status):
        _wait_for_next_attempt(draft, topology, observed)
    else:
        _check_attempt(draft, topology, observed, reports)
    if obstacle is None or status.attempt is not None:
        _observe(draft, topology, observed, reports)
    waits = obstacle is not None or job.spec.suspend
    if draft.status.download is not None and downloading.is_off(job, draft.status, observed, waits=waits):
        draft.update(download=None)
    new = with_usage(job, topology, status, draft.finish(), observed, reports, now)
    return Plan(
        status=new,
        mode=_mode(new, topology, observed, refused=obstacle is not None),
        limits=environment_pods.find_limits(new, topology, observed) or find_limits(draft, topology, observed),
        deletions=find_deletions(job, new, observed, now),
        scale=find_scale(job, topology, new, observed),
        queue=queueing.find_steps(job, topology, new, observed, now, refused=obstacle is not None),
        download=downloading.find_steps(job, new, observed, now, waits=waits),
        renewals=in_place.find_renewals(job, new, observed),
        requeue_after=seconds_to_next(job, new, observed, reports, now, obstacle and obstacle.reason, least),
        events=events_between(status, new, job),
    )


def _after_the_end(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed, now: datetime) -> Plan:
    """Plan a pass over an ended job: record how its last pods end, and delete the job after its time to live."""
    draft = Draft(status, job, now)
    if observed.pods or observed.environment_pods or observed.gone or any(group.ready for group in status.groups):
        record(draft, topology, observed, {})
    _observe(draft, topology, observed, {})
    new = with_usage(job, topology, status, draft.finish(), observed, {}, now)
    due = POLL_SECONDS if observed.pods or observed.environment_pods else None
    if job.spec.ttl_seconds_after_finished is not None and status.completion_time is not None:
        remaining = job.spec.ttl_seconds_after_finished - seconds_between(status.completion_time, now)
        if remaining <= 0:
            return Plan(status=status, delete_job=True)
        due = min(remaining, due or remaining)
    return Plan(
        status=new,
        mode=Mode.STOPPED,
        deletions=find_deletions(job, new, observed, now),
        queue=queueing.find_steps(job, topology, new, observed, now, refused=False),
        download=downloading.find_steps(job, new, observed, now, waits=True),
        requeue_after=due,
        events=events_between(status, new, job),
    )


def _observe(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Set what the pods do, which of them cannot be created or does not end, and which child does not."""
    before = draft.status
    observe_pods(draft, topology, observed, reports)
    spares = observed.pods.keys() - {*topology.needed_pods}
    if not attempts.is_running_undisturbed(draft.job, draft.status):
        spares = set()  # all pods have to end
    policy = draft.job.spec.failure_policy
    if held := describe_held(observed, policy, draft.now, observed.pods.keys() - spares):
        draft.revert(Condition.SCHEDULED, before)
        draft.set(Condition.SCHEDULED, False, Reason.POD_STUCK, held)
    elif orphan := describe_orphan(draft.status, observed):
        draft.set(Condition.SCHEDULED, False, Reason.POD_STUCK, orphan)
    for held in (describe_held_children(observed), describe_held(observed, policy, draft.now, spares)):
        running = find(draft.status, Condition.RUNNING)
        if running is not None and held and held not in running.message:
            value = {"True": True, "False": False}.get(running.status)
            draft.set(Condition.RUNNING, value, running.reason, f"{running.message}; {held}")


def _wait_in_queue(draft: Draft, topology: Topology, observed: Observed) -> None:
    why = queueing.describe(draft.job, observed)
    if observed.foreign and attempts.is_between_attempts(draft.status):  # until then it does not queue
        _wait_for_next_attempt(draft, topology, observed)
    elif draft.status.attempt is not None:
        lifecycle.queue(draft, find_left(observed, draft.now), why)
    else:
        attempts.wait_for_first(draft, topology, Reason.QUEUED, why)


def _download(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    restarts.follow_download(draft, downloading.find_failure(observed, draft.now))
    if is_terminal(draft.status):
        return
    said = downloading.describe(draft.status, observed, reports)
    reason, why = observed.why_absent or (Reason.DOWNLOADING, "")
    attempts.wait_for_first(draft, topology, reason, f"{said}; {why}" if why else said)


def _wait_for_next_attempt(draft: Draft, topology: Topology, observed: Observed) -> None:
    status = draft.status
    if status.attempt is None:
        message = lifecycle.wait_for_old(observed.foreign)
        draft.set(Condition.SCHEDULED, False, Reason.WAITING_FOR_OLD_CHILDREN, message)
        draft.clear(Condition.SUSPENDED, Reason.RESUMED, message)
    elif rests(status):
        lifecycle.stay_suspended(draft, find_left(observed, draft.now), observed.foreign)
    elif holds(status, Condition.RESTARTING):
        policy = draft.job.spec.failure_policy
        restarts.correct_cause(draft, find_failure(status, topology, observed, policy, draft.now))
        if keeps_pods(draft.status) and (why := in_place.find_hindrance(draft, observed)):
            restarts.recreate(draft, why)
        kept = keeps_pods(draft.status)
        left = (
            in_place.find_running(draft.status, observed) if kept else find_left(observed, draft.now, of_attempts=True)
        )
        lifecycle.name_left(draft, left, observed.foreign)


def _check_attempt(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Act on what ends the attempt: a failure, GPUs that are held in vain, or a hang; replace spare engines."""
    policy = draft.job.spec.failure_policy
    failure = find_failure(draft.status, topology, observed, policy, draft.now)
    if failure is None or failure.exit_code in EFFECTS:  # launchers also end because others have no node
        failure = find_placement_timeout(draft, topology, observed) or failure
    if failure is not None and may_be_an_effect(failure, draft.status, draft.now):
        failure = None
    failure = failure or environment_pods.find_failure(draft.status, topology, observed, draft.now)
    failure = failure or find_hang(draft.status, topology, observed, reports, policy, draft.now)
    if failure is not None:
        failure = of_silent_pod(failure, draft.status, topology.partners(failure.pod or ""))
        restarts.handle_failure(draft, failure, observed, topology.partners(failure.pod or ""))
    if not (is_terminal(draft.status) or attempts.is_between_attempts(draft.status)):
        spares = find_spare_failures(draft.status, topology, observed, policy, draft.now)
        restarts.replace_spares(draft, spares, observed)


def _mode(status: GRPOJobStatus, topology: Topology, observed: Observed, *, refused: bool) -> Mode:
    if status.attempt is None or keeps_pods(status):
        return Mode.KEEP
    if rests(status) and observed.pods.keys() & topology.trainer_pods:
        return Mode.ENGINES_ONLY  # ranks finish their step before they save, and may need the others for it
    if is_terminal(status) or rests(status):
        return Mode.STOPPED
    if attempts.is_between_attempts(status):
        return Mode.ENVIRONMENTS_ONLY if topology.environment_groups and not refused else Mode.STOPPED
    return Mode.RUN
