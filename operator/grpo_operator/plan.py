"""The decisions: from a job, what is observed and the time, to a new status and what to do next. Pure: `now` is an argument.

A job is accepted once (its epoch is set, which freezes the spec), runs until every trainer pod's outcome is recorded as done or one
of them failed, and is then Complete or Failed for ever. An outcome is recorded at first sight, since a StatefulSet's pod does not
keep it (design: run once, then hold).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grpo_operator.jobstatus import Failure, GroupStatus, GRPOJobStatus, MemberStatus, ProgressStatus
from grpo_operator.names import Condition, Reason, Role
from grpo_operator.observe import Observed, ObservedPod
from grpo_operator.status import holds, is_terminal, set_condition, summarise
from grpo_operator.topology import Job, Topology
from grpo_operator.verdict import find_failure, is_done, may_be_an_effect, seconds_between
from grpo_workload.contract import Progress

PROGRESS_SECONDS = 10
"""Status is written for progress at most this often: at every step of a fast job, the API server would pay for it."""

POLL_SECONDS = 2.0
RETRY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a person wants to know, told once."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What follows from one look at a job."""

    status: GRPOJobStatus
    replicas: Literal["keep", "run", "zero"] = "keep"  # what the children are brought to: nothing, the spec's, none
    requeue_after: float | None = None
    events: tuple[Event, ...] = field(default=())


class Draft:
    """A status in the making: every condition set through it carries the job's generation and the time."""

    def __init__(self, status: GRPOJobStatus, job: Job, now: str) -> None:
        self.status = status
        self._job, self._now = job, now

    def set(self, kind: Condition, value: bool | None, reason: str, message: str) -> None:
        """Set a condition."""
        self.status = set_condition(self.status, kind, value, reason, message, generation=self._job.generation, now=self._now)

    def update(self, **fields: object) -> None:
        """Set fields."""
        self.status = self.status.model_copy(update=fields)

    def finish(self) -> GRPOJobStatus:
        """The status, with everything derived."""
        self.update(observed_generation=self._job.generation)
        return summarise(self.status, self._job.spec.generation.topology)


def plan(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed, progress: Progress | None, now: str) -> Plan:
    """One look at a job whose spec is valid.

    `progress` is what rank 0's launcher just said, None when it did not answer: that is never acted on.
    """
    if is_terminal(status):
        return Plan(status=status, replicas="zero")
    draft = Draft(status, job, now)
    if status.epoch is None:
        if observed.foreign:
            return _wait_for_old_children(draft, observed)
        _accept(draft, topology, now)
    draft.update(members=_record(topology, draft.status, observed))
    _read_progress(draft, topology, observed, progress, now)
    _observe_groups(draft, topology, observed)

    failure = find_failure(draft.status, observed, now)
    if topology.trainer_pods <= {member.pod for member in draft.status.members if is_done(member.outcome)}:
        _end(draft, None, now)  # engines have served their turn, however they end
    elif failure is not None and not may_be_an_effect(failure, now):
        _end(draft, failure, now)
    else:
        _observe_pods(draft, topology, observed, progress)
    new = draft.finish()
    ended = is_terminal(new)
    return Plan(
        status=new,
        replicas="zero" if ended else "run",
        requeue_after=None if ended else POLL_SECONDS,
        events=_events(status, new, job),
    )


def refuse(job_status: GRPOJobStatus, generation: int, reason: str, message: str, now: str) -> Plan:
    """A spec that cannot be run: nothing is made until it is mended."""
    status = set_condition(job_status, Condition.ACCEPTED, False, reason, message, generation=generation, now=now)
    status = summarise(status.model_copy(update={"observed_generation": generation}), "")
    known = [c.message for c in job_status.conditions if c.type == Condition.ACCEPTED]
    events = () if known == [message] else (Event(type="Warning", reason=reason, message=message),)
    return Plan(status=status, events=events, requeue_after=None if reason == Reason.INVALID_SPEC else RETRY_SECONDS)


def _wait_for_old_children(draft: Draft, observed: Observed) -> Plan:
    shown = ", ".join(observed.foreign[:5])
    draft.set(
        Condition.SCHEDULED,
        False,
        Reason.WAITING_FOR_OLD_CHILDREN,
        f"children of an earlier job of this name are still being deleted: {shown}",
    )
    return Plan(status=draft.finish(), requeue_after=1.0)


def _accept(draft: Draft, topology: Topology, now: str) -> None:
    shape = ", ".join(f"{group.name} {group.spec.replicas} x {group.spec.gpus}" for group in topology.groups)
    message = f"{topology.world_size} ranks on {len(topology.members)} pods ({shape})"
    draft.set(Condition.ACCEPTED, True, Reason.VALID, message)
    draft.update(epoch=0, start_time=now)


def _record(topology: Topology, status: GRPOJobStatus, observed: Observed) -> tuple[MemberStatus, ...]:
    """Pods as first seen; an outcome once recorded stays."""
    known = {member.pod: member for member in status.members}
    members = []
    for group in topology.groups:
        for name in group.pods:
            pod, old = observed.pods.get(name), known.get(name)
            if pod is not None and (old is None or (old.uid == pod.uid and old.outcome is None)):
                old = MemberStatus(pod=name, role=group.role, uid=pod.uid, node=pod.node, outcome=pod.outcome)
            if old is not None:
                members.append(old)
    return tuple(members)


def _read_progress(draft: Draft, topology: Topology, observed: Observed, progress: Progress | None, now: str) -> None:
    master = observed.pods.get(topology.members[0].pod)
    final = master.final_progress if master else None
    newest, old = final or progress, draft.status.progress
    if newest is None or newest.total_steps == 0:
        return
    if old is not None and (old.step, old.checkpoint_step) == (newest.step, newest.checkpoint_step):
        return
    if old is not None and final is None and seconds_between(old.time, now) < PROGRESS_SECONDS:
        return
    draft.update(progress=ProgressStatus.read(newest, now), checkpoint=newest.checkpoint or draft.status.checkpoint)


def _observe_groups(draft: Draft, topology: Topology, observed: Observed) -> None:
    groups = tuple(
        GroupStatus(
            name=group.name,
            role=group.role,
            desired=group.spec.replicas,
            ready=sum(pod in observed.pods and observed.pods[pod].ready for pod in group.pods),
        )
        for group in topology.groups
    )
    draft.update(groups=groups)


def _end(draft: Draft, failure: Failure | None, now: str) -> None:
    """Set the terminal condition, once."""
    if failure is None:
        trainers = sum(member.role == Role.TRAINER for member in draft.status.members)
        steps = f" after {draft.status.progress.step} steps" if draft.status.progress else ""
        where = f"; checkpoint {draft.status.checkpoint}" if draft.status.checkpoint else ""
        draft.set(Condition.COMPLETE, True, Reason.TRAINING_DONE, f"all {trainers} trainer pods finished{steps}{where}")
    else:
        place = f"{failure.role} pod {failure.pod} on node {failure.node}, exit code {failure.exit_code}"
        first, _, more = failure.message.partition("\n")
        hint = " (more in status.lastFailure)" if more else ""
        draft.set(Condition.FAILED, True, failure.reason, f"{place}: {first}{hint}")
        draft.update(last_failure=failure)
    draft.set(Condition.RUNNING, False, Reason.FINISHED, "the job has ended")
    draft.update(completion_time=now)


def _observe_pods(draft: Draft, topology: Topology, observed: Observed, progress: Progress | None) -> None:
    expected = topology.pods
    pods = [observed.pods[name] for name in expected if name in observed.pods]
    unschedulable = next((pod for pod in pods if pod.unschedulable), None)
    waiting = [pod.name for pod in pods if pod.node is None]
    if len(pods) < len(expected):
        missing = next(name for name in expected if name not in observed.pods)
        hint = f"kubectl describe statefulset {missing.rpartition('-')[0]} says why"
        why = f"{len(pods)} of {len(expected)} pods exist; {missing} is missing ({hint})"
        draft.set(Condition.SCHEDULED, False, Reason.WAITING_FOR_PODS, why)
    elif unschedulable is not None:
        draft.set(Condition.SCHEDULED, False, Reason.UNSCHEDULABLE, f"pod {unschedulable.name}: {unschedulable.unschedulable}")
    elif waiting:
        draft.set(Condition.SCHEDULED, False, Reason.WAITING_FOR_PODS, f"{len(waiting)} pods wait for the scheduler, first {waiting[0]}")
    else:
        draft.set(Condition.SCHEDULED, True, Reason.ALL_PODS_SCHEDULED, f"all {len(pods)} pods have a node")
    draft.set(Condition.RUNNING, *_running(topology, pods, progress))


def _running(topology: Topology, pods: list[ObservedPod], progress: Progress | None) -> tuple[bool, str, str]:
    expected, ready = len(topology.pods), sum(pod.ready for pod in pods)
    if ready == expected:
        return True, Reason.ALL_RANKS_RUNNING, f"all {expected} pods are ready"
    stuck = next((pod for pod in pods if pod.waiting and not pod.waiting.startswith(("ContainerCreating", "PodInitializing"))), None)
    if stuck is not None:
        return False, Reason.CONTAINER_WAITING, f"pod {stuck.name} on node {stuck.node}: {stuck.waiting}"
    if progress is not None and progress.waiting_for:
        return False, Reason.WAITING_FOR_PEERS, f"rank 0 waits for {'; '.join(progress.waiting_for[:8])}"
    engines = [pod.name for pod in pods if pod.name not in topology.trainer_pods and not pod.ready]
    if engines and ready + len(engines) == expected:
        return False, Reason.WAITING_FOR_ENGINES, f"the ranks wait for {len(engines)} engines to load: {', '.join(engines[:8])}"
    return False, Reason.STARTING, f"{ready} of {expected} pods are ready"


def _events(old: GRPOJobStatus, new: GRPOJobStatus, job: Job) -> tuple[Event, ...]:
    """What changed, for `kubectl describe`: one event for each condition that came to hold, and for each new obstacle."""
    before: Mapping[str, tuple[str, str]] = {c.type: (c.status, c.reason) for c in old.conditions}
    events = []
    for condition in new.conditions:
        if before.get(condition.type) == (condition.status, condition.reason):
            continue
        obstacle = condition.reason in (Reason.UNSCHEDULABLE, Reason.CONTAINER_WAITING, Reason.WAITING_FOR_PEERS)
        if condition.status == "True" or obstacle:
            bad = obstacle or condition.type == Condition.FAILED
            reason = condition.reason if bad else condition.type
            events.append(Event(type="Warning" if bad else "Normal", reason=reason, message=condition.message[:1024]))
    if not holds(old, Condition.ACCEPTED) and holds(new, Condition.ACCEPTED) and job.spec.storage.claim_name is None:
        message = "spec.storage.claimName is not set: checkpoints are lost with the pods, and a new attempt begins at step 0"
        events.append(Event(type="Warning", reason=Reason.RESTARTS_FROM_STEP_ZERO, message=message))
    return tuple(events)
