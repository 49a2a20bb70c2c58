"""The pods of a job that are not ready, their ranks, and the causes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.screen import words
from grpo_operator.api.names import Role
from grpo_operator.decide.environment_pods import is_ready, why_not_ready
from grpo_operator.decide.observed_pod import ObservedPod, read_pod
from grpo_operator.layout.topology import Topology

CREATING = "ContainerCreating"
"""Kubelet's reason for a pod that has a node and is not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTrouble:
    """Pods that are not ready for the same cause."""

    pods: Sequence[str]
    ranks: str  # their ranks as ranges; empty for others than trainer pods
    cause: str


def ranks_of(topology: Topology) -> dict[str, range]:
    """Return the global ranks of each trainer pod."""
    return {member.pod: range(member.rank_offset, member.rank_offset + member.gpus) for member in topology.members}


def running_pods(pods: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of pods whose containers run."""
    return {pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"}


def troubles(topology: Topology, pods: Sequence[Mapping[str, Any]], warnings: Mapping[str, str]) -> list[PodTrouble]:
    """Return the pods of the topology that are not ready, by cause, in order of ranks.

    `warnings`: the newest warning about a pod, by its UID. It is the cause while a container is being created: a volume
    that cannot be mounted is in no status.
    """
    there = {pod["metadata"]["name"]: pod for pod in pods}
    causes: dict[str, list[str]] = {}
    for pod in (*topology.pods, *topology.environment_pods):
        cause = why_not_ready_yet(read_pod(there[pod]), there[pod]) if pod in there else "does not exist yet"
        if cause == CREATING and (warning := warnings.get(there[pod]["metadata"]["uid"])):
            cause = f"{cause}: {warning}"
        if cause:
            causes.setdefault(cause, []).append(pod)
    ranks = ranks_of(topology)
    return [
        PodTrouble(pods=names, ranks=words.ranges(rank for name in names for rank in ranks.get(name, ())), cause=cause)
        for cause, names in causes.items()
    ]


def leftovers(pods: Sequence[Mapping[str, Any]]) -> list[PodTrouble]:
    """Return the pods of an attempt that has ended; the next attempt waits for them."""
    names = sorted(str(pod["metadata"]["name"]) for pod in pods)
    return [PodTrouble(pods=names, ranks="", cause="being ended, with the last attempt")] if names else []


def why_not_ready_yet(pod: ObservedPod, raw: Mapping[str, Any]) -> str:
    """Return why a pod is not ready; empty if it is. `raw`: as the API server returned it."""
    if pod.role == Role.ENVIRONMENT:
        return "" if is_ready(pod) else why_not_ready(pod)
    if pod.outcome is not None:
        code = f", exit code {pod.outcome.exit_code}" if pod.outcome.exit_code >= 0 else ""
        return f"ended: {pod.outcome.reason}{code}"
    if pod.disruption is not None:
        return f"being removed: {pod.disruption.reason}: {pod.disruption.message}"
    if pod.deletion_time is not None:
        return "being deleted"
    if pod.ready:
        return ""
    if _is_cut_off(raw):
        return f"its node {pod.node} does not answer: the state of its ranks is unknown"
    if pod.unschedulable is not None:
        return f"no node fits: {pod.unschedulable}"
    if pod.waiting is not None:
        return pod.waiting
    if pod.ip:
        return "not ready yet: ranks or engines are starting"
    return f"starting on node {pod.node}" if pod.node else "waits for the scheduler"


def _is_cut_off(pod: Mapping[str, Any]) -> bool:
    """Whether a pod lost only its condition Ready, which the cluster changes when a node stops answering."""
    holds = {c["type"]: c["status"] == "True" for c in pod.get("status", {}).get("conditions") or ()}
    return holds.get("ContainersReady", False) and not holds.get("Ready", True)
