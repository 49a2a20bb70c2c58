"""Which pods the operator deletes itself, which of them by force, and which one does not end. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_operator.api.failure_policy import FailurePolicy
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.blame import node_lost_since, seconds_between
from grpo_operator.decide.lifecycle import after
from grpo_operator.decide.observe import Observed, ObservedPod
from grpo_operator.layout.topology import Job

OVERSTAY_SECONDS = 60
"""A pod that still exists this long after its grace period does not end by itself."""

HELD_SECONDS = 1800
"""A pod that still exists this long after its grace period is deleted by force although its node is not known to be
lost. A process or a volume may still be in use there, so that a person should have had the time to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A pod to delete, by UID: never another pod of the same name."""

    pod: str
    uid: str
    force: bool  # without waiting for its kubelet


def find_deletions(job: Job, status: GRPOJobStatus, observed: Observed, now: str) -> tuple[Deletion, ...]:
    """Return the pods that no controller deletes: on a lost node, of an earlier attempt, or engines to be replaced."""
    replaced = {member.uid for member in status.members if member.replacing}
    deletions = []
    for pod in observed.pods.values():
        if pod.deletion_time is None:
            if pod.uid in replaced or pod.attempt != status.attempt:
                deletions.append(Deletion(pod=pod.name, uid=pod.uid, force=False))
        elif _is_given_up(pod, observed, job.spec.failure_policy, now):
            deletions.append(Deletion(pod=pod.name, uid=pod.uid, force=True))
    return tuple(deletions)


def describe_held(observed: Observed, policy: FailurePolicy, now: str) -> str | None:
    """Say which pod does not end although its node is not lost, what holds it and until when, or None."""
    held = [
        pod
        for pod in observed.pods.values()
        if _overstay(pod, now) > OVERSTAY_SECONDS and not _has_lost_node(pod, observed, policy, now)
    ]
    if not held:
        return None
    first = min(held, key=lambda pod: (pod.deletion_time or "", pod.name))
    others = f", like {len(held) - 1} more," if len(held) > 1 else ""
    until = after(first.deletion_time or now, HELD_SECONDS)
    return (
        f"pod {first.name} on node {first.node}{others} did not end with its grace period at {first.deletion_time}: "
        f"{first.held_by}; it is deleted by force at {until} (kubectl delete pod --force does it now)"
    )


def _is_given_up(pod: ObservedPod, observed: Observed, policy: FailurePolicy, now: str) -> bool:
    return _overstay(pod, now) > HELD_SECONDS or _has_lost_node(pod, observed, policy, now)


def _has_lost_node(pod: ObservedPod, observed: Observed, policy: FailurePolicy, now: str) -> bool:
    """Whether no kubelet will confirm the pod's end.

    Where nodes cannot be read, an eviction by a taint stands for it: Kubernetes taints nodes that are lost.
    """
    if node_lost_since(pod, observed, policy, now):
        return True
    overstays = _overstay(pod, now) > OVERSTAY_SECONDS
    return overstays and (
        pod.node in observed.absent_nodes or (pod.evicted_by_taint and pod.node not in observed.ready_nodes)
    )


def _overstay(pod: ObservedPod, now: str) -> float:
    """Return the seconds since the end of the pod's grace period; negative before, and if it is not being deleted."""
    return -1.0 if pod.deletion_time is None else seconds_between(pod.deletion_time, now)
