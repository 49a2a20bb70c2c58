"""Whether a restart keeps the pods (`failurePolicy.restartStrategy: InPlace`), and when its attempt begins in them.

Pure. Kept pods keep their nodes and GPUs, so a job that waits for some cannot take them. The first process of a pod
whose part of an attempt has ended holds (`grpo_workload/pod/run_once.py`) until it finds a later attempt's contract in
its file: the ConfigMap of the pods is changed. A kubelet renews the file when it looks at the pod again, once a minute
or when the pod changes; so the operator writes the attempt into an annotation of each pod.

Pods are kept only where programs alone have failed. If a pod or its node is lost, one does not end, or an attempt does
not come to run in kept pods, all pods are recreated.
"""

from __future__ import annotations

from grpo_operator.api.names import Condition, Role
from grpo_operator.api.status import Failure, GRPOJobStatus, MemberStatus
from grpo_operator.api.times import seconds_between
from grpo_operator.decide.blame import EFFECTS
from grpo_operator.decide.conditions import Draft, holds, is_terminal, rests
from grpo_operator.decide.observe import Left, Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.job import Job
from grpo_spec.reasons import Reason

LATE_SECONDS = 300
"""Seconds after the back-off in which the pods have to hold; ranks may save, and peers notice what they lost."""


def may_keep(draft: Draft, failure: Failure, observed: Observed) -> bool:
    """Whether the attempt after this failure may begin in the same pods."""
    policy, status = draft.job.spec.failure_policy, draft.status
    is_wanted = policy.restart_strategy == "InPlace" and status.running_time is not None
    # A contract that another setting made immutable cannot become the next attempt's.
    can_change = not any(child.kind == "ConfigMap" and child.raw.get("immutable") for child in observed.children)
    # Ranks that hang may not end. If ranks lost a pod and none has failed, a node or the network has.
    is_of_a_program = failure.pod is not None and failure.reason != Reason.HUNG and failure.exit_code not in EFFECTS
    return is_wanted and can_change and is_of_a_program and find_loss(status, observed) is None


def find_loss(status: GRPOJobStatus, observed: Observed) -> str | None:
    """Say which pod is not there any more as it was, or is about to go; None if all are well."""
    return next((why for member in status.members if (why := _loss(member, observed))), None)


def _loss(member: MemberStatus, observed: Observed) -> str | None:
    pod = observed.pods.get(member.pod)
    if pod is None or pod.uid != member.uid:
        return f"pod {member.pod} is gone"
    if pod.deletion_time or pod.disruption or member.disruption or member.replacing:
        return f"pod {member.pod} is being taken away"
    if pod.node in observed.lost_nodes:
        return f"pod {member.pod} is on node {pod.node}, which is not ready"
    return None


def is_ready(job: Job, status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether all pods wait for the next attempt: trainers have ended, and of all that ended it is known in which one.

    Engines may run: they go on when the next attempt begins.
    """
    if find_loss(status, observed) is not None or not _same_quota(job, status):
        return False
    return all(_waits(member, observed.pods[member.pod]) for member in status.members)


def find_running(status: GRPOJobStatus, observed: Observed) -> dict[str, Left]:
    """Return the pods whose ranks have not ended yet, by name, as `deletions.find_left` does."""
    pods = ((member, observed.pods.get(member.pod)) for member in status.members)
    return {member.pod: Left() for member, pod in pods if pod is not None and not _waits(member, pod)}


def _waits(member: MemberStatus, pod: ObservedPod) -> bool:
    return pod.endings[0].attempt is not None if pod.endings else member.role == Role.GENERATION


def _same_quota(job: Job, status: GRPOJobStatus) -> bool:
    return job.admission == status.admission


def find_hindrance(draft: Draft, observed: Observed) -> str | None:
    """Say why pods that were to be kept must be recreated, or None."""
    job, status = draft.job, draft.status
    if loss := find_loss(status, observed):
        return loss
    if not _same_quota(job, status):
        return "Kueue has admitted it to other nodes"
    is_late = seconds_between(status.next_restart_time or draft.now, draft.now) > LATE_SECONDS
    if is_late and not is_ready(job, status, observed):
        return f"not all of them had ended {LATE_SECONDS} s after the back-off"
    return None


def find_renewals(job: Job, status: GRPOJobStatus, observed: Observed) -> tuple[tuple[str, str], ...]:
    """Return the name and UID of each pod whose kubelet has to renew the contract, because an attempt begins in it."""
    ends = is_terminal(status) or holds(status, Condition.RESTARTING) or rests(status)
    if status.pods_attempt is None or ends or job.spec.suspend:
        return ()
    return tuple(
        (pod.name, pod.uid)
        for pod in observed.pods.values()
        if pod.attempt == status.pods_attempt and pod.announced_attempt != status.attempt and pod.deletion_time is None
    )
