"""The pods in which tools and environments run: what an attempt waits for, and what is said of them. Pure.

They belong to no attempt. Their kubelets restart them, and whatever they do, no attempt ends for it: ranks begin an
episode again on another one. Only before an attempt has its first pod, one of each group has to be ready, so that no
GPU waits for an image that cannot be pulled. Until then a user's mistake that one of them finds ends the job: no rank
is there yet to hear of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from grpo_operator.api.names import Role
from grpo_operator.api.status import Failure, GRPOJobStatus
from grpo_operator.decide.lifecycle import first_line
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.groups import Group
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason
from grpo_spec.words import counted


def is_ready(pod: ObservedPod) -> bool:
    """Whether an environment pod takes sessions."""
    return pod.ready and pod.deletion_time is None


def find_wait(status: GRPOJobStatus, topology: Topology, observed: Observed) -> tuple[Reason, str] | None:
    """Return what an attempt without pods waits for before it gets any (reason, message), or None."""
    missing = _missing(status, topology, observed)
    if not missing:
        return None
    names = ", ".join(group.name for group in missing)
    why = next(_troubles(missing[0], observed))
    return (
        Reason.WAITING_FOR_ENVIRONMENTS,
        f"no GPU is asked for yet, as no environment pod of {names} is ready: {why}",
    )


def find_failure(status: GRPOJobStatus, topology: Topology, observed: Observed, now: datetime) -> Failure | None:
    """Return why a pod that the attempt waits for never gets ready: its program refuses what the job names, or None."""
    for group in _missing(status, topology, observed):
        for pod in filter(None, map(observed.environment_pods.get, group.pods)):
            last = pod.endings[-1].outcome if pod.endings else None
            if last and last.reason == Reason.CONFIG_ERROR:
                return Failure(
                    pod=pod.name,
                    role=Role.ENVIRONMENT,
                    node=pod.node,
                    exit_code=last.exit_code,
                    reason=last.reason,
                    message=clip(last.message, 4096),
                    time=now,
                    attempt=status.attempt or 0,
                )
    return None


def find_limits(status: GRPOJobStatus, topology: Topology, observed: Observed) -> dict[str, int]:
    """Return that StatefulSets of an attempt that waits for environment pods have no pod; empty if it does not wait."""
    waits = find_wait(status, topology, observed)
    return {group.statefulset: 0 for group in topology.groups} if waits else {}


def describe(topology: Topology, observed: Observed) -> str:
    """Say how many environment pods are ready, and what the first other one does; an empty text without such pods."""
    groups = topology.environment_groups
    if not groups:
        return ""
    wanted, ready = len(topology.environment_pods), sum(_ready(group, observed) for group in groups)
    trouble = next((why for group in groups for why in _troubles(group, observed)), None)
    return f", and {ready} of {wanted} environment pods" + (f"; {trouble}" if trouble else "")


def _missing(status: GRPOJobStatus, topology: Topology, observed: Observed) -> list[Group]:
    """Return the groups that an attempt without pods waits for."""
    if status.running_time is not None or any(pod.attempt == status.created_for for pod in observed.pods.values()):
        return []
    return [group for group in topology.environment_groups if not _ready(group, observed)]


def _ready(group: Group, observed: Observed) -> int:
    pods = (observed.environment_pods.get(name) for name in group.pods)
    return sum(pod is not None and is_ready(pod) for pod in pods)


def _troubles(group: Group, observed: Observed) -> Iterator[str]:
    """Yield why each pod of a group is not ready."""
    for name in group.pods:
        pod = observed.environment_pods.get(name)
        if pod is None:
            is_about_it = observed.why_absent is not None and name in observed.why_absent[1]
            yield observed.why_absent[1] if observed.why_absent and is_about_it else f"{name} does not exist yet"
        elif not is_ready(pod):
            yield f"{name} on node {pod.node}: {why_not_ready(pod)}" if pod.node else f"{name}: {why_not_ready(pod)}"


def why_not_ready(pod: ObservedPod) -> str:
    """Say why an environment pod takes no sessions."""
    if pod.deletion_time is not None:
        return "it is being deleted, and another one follows"
    if pod.node is None:
        return f"no node fits: {pod.unschedulable}" if pod.unschedulable else "it waits for the scheduler"
    if not pod.endings:
        return pod.waiting or "it is not ready yet; it begins by importing the modules of tools and environments"
    last, times = pod.endings[-1].outcome, max(pod.restarts, 1)
    waits = f", {pod.waiting.partition(':')[0]}" if pod.waiting else ""
    ended = f"ended {counted(times, 'time')}{waits}"
    said = first_line(last.message, " ...")
    return f"{ended}; the last one as {last.reason}" + (f": {said}" if said else "")
