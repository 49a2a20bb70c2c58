"""In which order the pods of an attempt look for nodes, which have none, why, and for how long others hold GPUs in
vain. Pure.

Pods that need more GPUs come first: the scheduler takes pods one by one, and one of a smaller group may take the only
node on which one of a larger group fits, although it fits elsewhere.

Engines that the job does not need come last: they would take nodes that trainer pods need. Those that are not in the
gang wait until the gang has its nodes, since a job that waits is to hold no GPU.

Two jobs that each hold what the other needs would wait for each other. So an attempt that has not run yet gives its
GPUs back when no other pod has found a node for `scheduling.timeoutSeconds`. One of which no pod has a node holds
nothing, and waits until `startupDeadlineSeconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from grpo_operator.api.placement_status import PlacementStatus
from grpo_operator.api.status import Failure, GRPOJobStatus
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide.conditions import Draft
from grpo_operator.decide.failure_policy import placement_seconds
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason
from grpo_spec.words import counted


def pods_of_attempt(draft: Draft, topology: Topology, observed: Observed) -> list[ObservedPod]:
    """Return the pods of the current attempt that exist, in the order of the topology, of those that the job needs."""
    found = (observed.pods.get(name) for name in topology.needed_pods)
    return [pod for pod in found if pod is not None and pod.attempt == draft.status.created_for]


def record_placement(draft: Draft, topology: Topology, observed: Observed) -> None:
    """Record how many pods of the attempt have a node while others have none, and when that number last grew."""
    old = draft.status.placement
    placed = sum(pod.node is not None for pod in pods_of_attempt(draft, topology, observed))
    if draft.status.running_time is not None or placed in (0, len(topology.needed_pods)):
        draft.update(placement=None)
    elif old is None or placed > old.placed:
        draft.update(placement=PlacementStatus(placed=placed, since=draft.now))


def find_placement_timeout(draft: Draft, topology: Topology, observed: Observed) -> Failure | None:
    """Return a failure without a pod if some pods have waited for the nodes of the others for too long, else None.

    A launcher that has given up on the others has waited for too long, too, if a trainer pod has no node.
    """
    placement, pods = draft.status.placement, pods_of_attempt(draft, topology, observed)
    obstacle = why_unplaced(topology, pods, observed.why_absent)
    if placement is None or obstacle is None:
        return None
    lacking = topology.trainer_pods - {pod.name for pod in pods if pod.node is not None}
    given_up = [m for m in draft.status.members if m.outcome and m.outcome.reason == Reason.PEERS_MISSING]
    if seconds_between(ends(draft.job, draft.status, placement), draft.now) < 0 and not (lacking and given_up):
        return None
    total, why = len(topology.needed_pods), obstacle[1]
    message = (
        f"{placement.placed} of {total} pods had a node, and since {rfc3339(placement.since)} no other pod has found "
        f"one: {why}; their GPUs are given back (scheduling.timeoutSeconds); the job runs once all {total} pods fit at "
        "the same time: free GPUs, add nodes or ask for fewer"
    )
    return Failure(
        reason=Reason.PLACEMENT_TIMEOUT, message=clip(message, 4096), time=draft.now, attempt=draft.status.attempt or 0
    )


def find_limits(draft: Draft, topology: Topology, observed: Observed) -> dict[str, int]:
    """Return the replica limit of each StatefulSet while the attempt is being placed; no entry means no limit."""
    if draft.status.running_time is not None:
        return {}
    pods = pods_of_attempt(draft, topology, observed)
    held = {group.statefulset: 0 for group in _held(topology, pods)}
    known = (observed.pods.get(name) for name in topology.elastic_pods)
    begun = any(pod is not None and pod.attempt == draft.status.created_for for pod in known)
    if begun or _placed(pods, topology.needed_pods):
        return held
    return {group.statefulset: len(group.needed_pods) for group in topology.elastic_groups} | held


def _held(topology: Topology, pods: Sequence[ObservedPod]) -> tuple[Group, ...]:
    """Return the groups to hold back: groups of smaller pods wait until the scheduler has tried every larger pod.

    Where it finds no node for a larger pod, smaller ones do not wait: an autoscaler adds nodes for all that it sees.
    Of a gang it looks at no pod before all exist.
    """
    if topology.gang_pods:
        return () if _placed(pods, topology.gang_pods) else topology.elastic_groups
    looked_at = {pod.name for pod in pods if pod.node is not None or pod.unschedulable is not None}
    most = max((group.gpus for group in topology.groups if not looked_at.issuperset(group.needed_pods)), default=0)
    return tuple(group for group in topology.groups if group.gpus < most)


def _placed(pods: Sequence[ObservedPod], names: Sequence[str]) -> bool:
    """Return whether all pods of these names have a node."""
    return {pod.name for pod in pods if pod.node is not None}.issuperset(names)


def why_unplaced(
    topology: Topology, pods: list[ObservedPod], why_absent: tuple[Reason, str] | None
) -> tuple[Reason, str] | None:
    """Return why not all pods have a node, or None if they have. `pods`: those of the attempt that exist."""
    known = {pod.name for pod in pods}
    absent = [name for name in topology.needed_pods if name not in known]
    later = {name for group in _held(topology, pods) for name in group.pods} if absent else set()
    if missing := next((name for name in absent if name not in later), None):
        hint = f"kubectl describe statefulset {missing.rpartition('-')[0]} says why"
        reason, why = why_absent or (Reason.WAITING_FOR_PODS, f"{missing} is missing ({hint})")
        return reason, f"{len(pods)} of {counted(len(topology.needed_pods), 'pod exists', 'pods exist')}; {why}"
    if (pod := next((pod for pod in pods if pod.unschedulable), None)) is not None:
        return Reason.UNSCHEDULABLE, f"pod {pod.name}: {pod.unschedulable}"
    if waiting := [pod.name for pod in pods if pod.node is None]:
        return (
            Reason.WAITING_FOR_PODS,
            f"{counted(len(waiting), 'pod waits', 'pods wait')} for the scheduler; the first is {waiting[0]}",
        )
    return None


def describe_hold(draft: Draft, topology: Topology) -> str:
    """Say which pods hold GPUs meanwhile, and until when; an empty text if none does."""
    if (placement := draft.status.placement) is None:
        return ""
    until = ends(draft.job, draft.status, placement)
    return (
        f"; {placement.placed} of {len(topology.needed_pods)} pods have a node, the last since "
        f"{rfc3339(placement.since)}; they give their GPUs back at "
        f"{rfc3339(until)} unless another pod finds a node (scheduling.timeoutSeconds)"
    )


def ends(job: Job, status: GRPOJobStatus, placement: PlacementStatus) -> datetime:
    """Return the time when the attempt ends unless another pod finds a node."""
    limit = job.spec.scheduling.timeout_seconds or job.spec.rendezvous.timeout_seconds
    return after(placement.since, placement_seconds(limit, job.uid, status.attempt or 0))
