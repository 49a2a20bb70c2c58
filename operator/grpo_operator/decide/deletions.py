"""Objects that the operator deletes itself, some pods by force, and those that do not end. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from grpo_operator.api import names
from grpo_operator.api.failure_policy import FailurePolicy
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.blame import node_lost_since
from grpo_operator.decide.conditions import is_terminal, rests
from grpo_operator.decide.objects import finalizers_of
from grpo_operator.decide.observe import Left, Observed, has_no_set, is_being_deleted
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.restarts import is_due
from grpo_operator.layout.job import Job

OVERSTAY_SECONDS = 60
"""A pod that still exists this long after its grace period does not end by itself."""

HELD_SECONDS = 1800
"""A pod that still exists this long after its grace period is deleted by force although its node is not known to be
lost. A process or a volume may still be in use there, so that a person should have had the time to look."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete, by UID: never another one of the same name."""

    kind: str
    name: str
    uid: str
    force: bool = False  # without waiting for the pod's kubelet


def find_deletions(job: Job, status: GRPOJobStatus, observed: Observed, now: datetime) -> tuple[Deletion, ...]:
    """Return the objects that no controller deletes.

    Those are pods on a lost node or of an earlier attempt, engines to be replaced, pods that should end although their
    StatefulSet was replaced, and what an earlier job abandoned.
    """
    replaced = {one.uid for one in status.members if one.replacing and is_due(one.replace_time, now)}
    sets = {child.uid for child in observed.children if child.kind == "StatefulSet"}
    ends = is_terminal(status) or is_between_attempts(status)
    stops = is_terminal(status) or rests(status)
    environments = observed.environment_pods.values()
    deletions = [
        Deletion("Pod", pod.name, pod.uid)
        for pod in environments
        if stops and pod.deletion_time is None and has_no_set(pod, sets)
    ]
    # The Job that downloads makes no other pod before its last one has ended.
    downloading = [pod for pod in observed.downloaders if pod.deletion_time is not None and not pod.outcome]
    ending = [pod for pod in environments if pod.deletion_time is not None]
    for pod in (*observed.pods.values(), *downloading, *ending):
        if pod.deletion_time is None:
            if pod.uid in replaced or pod.attempt != status.created_for or (ends and has_no_set(pod, sets)):
                deletions.append(Deletion("Pod", pod.name, pod.uid))
        elif not pod.deleted_for_good and _is_given_up(pod, observed, job.spec.failure_policy, now):
            deletions.append(Deletion("Pod", pod.name, pod.uid, force=True))
    return (*deletions, *(Deletion(kind, name, uid) for kind, name, uid in observed.abandoned))


def describe_held_children(observed: Observed) -> str | None:
    """Say which child that was deleted is held by finalizers, which are others', or None. Kueue holds its Workloads."""
    for child in observed.children:
        if child.kind != names.QUEUE_KIND and is_being_deleted(child) and (held := finalizers_of(child.raw)):
            cure = "whoever set them has to remove them"
            return f"{child.kind} {child.name} was deleted, and its finalizers hold it ({held}): {cure}"
    return None


def describe_orphan(status: GRPOJobStatus, observed: Observed) -> str | None:
    """Say which pod should end and nothing ends, because somebody took its owner from it, or None."""
    if is_terminal(status) or is_between_attempts(status):
        for pod in observed.pods.values():
            if pod.is_orphan and pod.deletion_time is None:
                return f"pod {pod.name} on node {pod.node} has lost its owner, so no StatefulSet ends it: delete it"
    return None


def find_left(observed: Observed, now: datetime, *, of_attempts: bool = False) -> dict[str, Left]:
    """Return the pods that exist, by name. Those that something keeps come first, and environment pods last, which end
    after the others. `of_attempts`: without environment pods, which stay between attempts.
    """
    downloading = [pod for pod in observed.downloaders if pod.outcome is None]
    environments = () if of_attempts else observed.environment_pods.values()
    left = {pod.name: _left(pod, observed, now) for pod in (*observed.pods.values(), *downloading, *environments)}
    return dict(sorted(left.items(), key=lambda one: (not one[1].why, one[0] in observed.environment_pods, one[0])))


def _left(pod: ObservedPod, observed: Observed, now: datetime) -> Left:
    why = _hindrance(pod, observed, now)
    return Left(why, None if why else pod.deletion_time)


def _hindrance(pod: ObservedPod, observed: Observed, now: datetime) -> str:
    if pod.node in observed.absent_nodes:
        return f"its node {pod.node} no longer exists"
    if pod.node is not None and (since := observed.lost_nodes.get(pod.node)):
        return f"its node {pod.node} has not been ready since {rfc3339(since)}"
    if pod.deletion_time and pod.finalizers:
        return f"its finalizers hold it: {pod.finalizers}"
    if pod.deletion_time is None or _overstay(pod, now) <= OVERSTAY_SECONDS:
        return ""
    return f"on node {pod.node}, it did not end with its grace period at {rfc3339(pod.deletion_time)}"


def describe_held(observed: Observed, policy: FailurePolicy, now: datetime, among: Collection[str]) -> str | None:
    """Say which of the pods named does not end although its node is not lost, what holds it and until when, or None."""
    held = [
        pod
        for pod in observed.pods.values()
        if pod.name in among
        and _overstay(pod, now) > OVERSTAY_SECONDS
        and (pod.deleted_for_good or not _has_lost_node(pod, observed, policy, now))
    ]
    if not held:
        return None
    first = min(held, key=lambda pod: (pod.deletion_time or now, pod.name))
    others = f", like {len(held) - 1} more," if len(held) > 1 else ""
    ended = first.deletion_time or now
    until = rfc3339(after(ended, HELD_SECONDS))
    cure = f"it is deleted by force at {until} (kubectl delete pod --force does it now)"
    if first.deleted_for_good:
        cure = "whoever set them has to remove them"
    return (
        f"pod {first.name} on node {first.node}{others} did not end with its grace period at {rfc3339(ended)}: "
        f"{first.held_by}; {cure}"
    )


def _is_given_up(pod: ObservedPod, observed: Observed, policy: FailurePolicy, now: datetime) -> bool:
    return _overstay(pod, now) > HELD_SECONDS or _has_lost_node(pod, observed, policy, now)


def _has_lost_node(pod: ObservedPod, observed: Observed, policy: FailurePolicy, now: datetime) -> bool:
    """Whether no kubelet will confirm the pod's end.

    Where nodes cannot be read, an eviction by a taint stands for it: Kubernetes taints nodes that are lost.
    """
    if node_lost_since(pod, observed, policy, now):
        return True
    overstays = _overstay(pod, now) > OVERSTAY_SECONDS
    return overstays and (
        pod.node in observed.absent_nodes or (pod.evicted_by_taint and pod.node not in observed.ready_nodes)
    )


def _overstay(pod: ObservedPod, now: datetime) -> float:
    """Return the seconds since the end of the pod's grace period; negative before, and if it is not being deleted."""
    return -1.0 if pod.deletion_time is None else seconds_between(pod.deletion_time, now)
