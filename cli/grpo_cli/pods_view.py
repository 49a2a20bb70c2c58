"""Which of a job's pods are not as they should be, which ranks are missing with them, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli import words
from grpo_operator.observe import ObservedPod, read_pod
from grpo_operator.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTrouble:
    """Pods that are missing for one and the same cause."""

    pods: Sequence[str]
    ranks: str  # theirs, as ranges; empty for engines
    cause: str


def ranks_of(topology: Topology) -> dict[str, range]:
    """Global ranks by trainer pod."""
    return {member.pod: range(member.rank_offset, member.rank_offset + member.gpus) for member in topology.members}


def running_pods(pods: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of those whose containers run."""
    return {pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"}


def troubles(topology: Topology, pods: Sequence[Mapping[str, Any]]) -> list[PodTrouble]:
    """The pods of the topology that are not ready, by cause, in the order of the ranks."""
    there = {pod["metadata"]["name"]: pod for pod in pods}
    causes: dict[str, list[str]] = {}
    for pod in topology.pods:
        if cause := _cause(read_pod(there[pod]), there[pod]) if pod in there else "not there yet":
            causes.setdefault(cause, []).append(pod)
    ranks = ranks_of(topology)
    return [
        PodTrouble(pods=names, ranks=words.ranges(rank for name in names for rank in ranks.get(name, ())), cause=cause)
        for cause, names in causes.items()
    ]


def leftovers(pods: Sequence[Mapping[str, Any]]) -> list[PodTrouble]:
    """Pods of an attempt that has ended, which the next one waits for."""
    names = sorted(str(pod["metadata"]["name"]) for pod in pods)
    return [PodTrouble(pods=names, ranks="", cause="of the last attempt, being ended")] if names else []


def _cause(pod: ObservedPod, raw: Mapping[str, Any]) -> str:
    if pod.outcome is not None:
        code = f", exit code {pod.outcome.exit_code}" if pod.outcome.exit_code >= 0 else ""
        return f"ended: {pod.outcome.reason}{code}"
    if pod.disruption is not None:
        return f"being taken away: {pod.disruption.reason}: {pod.disruption.message}"
    if pod.deletion_time is not None:
        return "being deleted"
    if pod.ready:
        return ""
    if _is_cut_off(raw):
        return f"its node {pod.node} does not answer: what the ranks do there is not known"
    if pod.unschedulable is not None:
        return f"no node for it: {pod.unschedulable}"
    if pod.waiting is not None:
        return pod.waiting
    return (
        "not ready yet: ranks or engines are being started"
        if pod.ip
        else f"starting on node {pod.node}"
        if pod.node
        else "waits for the scheduler"
    )


def _is_cut_off(pod: Mapping[str, Any]) -> bool:
    """Whether its containers were ready when its node was last heard of: the cluster then takes back that the pod is."""
    holds = {c["type"]: c["status"] == "True" for c in pod.get("status", {}).get("conditions") or ()}
    return holds.get("ContainersReady", False) and not holds.get("Ready", True)
