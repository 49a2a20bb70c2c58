"""The sides that are compared: what each one creates for a job, what runs for it, and when its status says ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.control_plane import manifests, peers
from benchmarks.control_plane.client import Manifest
from benchmarks.control_plane.fake_nodes import FakeNodes
from benchmarks.control_plane.manifests import Shape
from benchmarks.control_plane.observer import processor_seconds, use


def _nothing() -> None:
    """Bare StatefulSets have no controller of their own."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to run a job. Its controller runs only while it is measured."""

    name: str
    make: Callable[[str, Shape], list[Manifest]]
    kind: str = ""  # whose status is watched; "" if there is none
    says: Callable[[Manifest], int | None] = field(default=lambda _: None)  # number of the attempt that is ready
    user: str = ""  # of the controller, in the audit log
    cpu: Callable[[], float] = lambda: 0.0  # seconds of processor time that the controller has taken
    start: Callable[[], None] = _nothing
    stop: Callable[[], None] = _nothing


def sides(nodes: FakeNodes) -> dict[str, Side]:
    """Return the sides by their names, installed on a control plane."""
    found = [
        Side(name="bare", make=manifests.bare),
        Side(
            name="grpojob",
            make=manifests.grpojob,
            kind="GRPOJob",
            says=_grpojob_runs,
            user=nodes.release.user,
            cpu=lambda: use(nodes.metrics_port)["cpu"],
            start=nodes.operator.start,
            stop=nodes.operator.kill,
        ),
        Side(name="jobset", make=manifests.jobset, kind="JobSet", says=_jobset_is_ready, **_runs(nodes, peers.JOBSET)),
        Side(
            name="lws",
            make=manifests.leader_worker_set,
            kind="LeaderWorkerSet",
            says=_lws_is_available,
            **_runs(nodes, peers.LWS),
        ),
    ]
    return {side.name: side for side in found}


def _runs(nodes: FakeNodes, peer: peers.Peer) -> dict[str, Any]:
    """Install a peer and return who it is, what it uses, and how it is started and stopped."""
    process = peers.install(nodes.plane, peer)
    return {
        "user": peer.user,
        "cpu": lambda: processor_seconds(process.pid()),
        "start": process.start,
        "stop": lambda: process.stop(grace=0),
    }


def _grpojob_runs(job: Manifest) -> int | None:
    status = job.get("status", {})
    return int(status.get("attempt", 0)) if status.get("phase") == "Running" else None


def _jobset_is_ready(jobset: Manifest) -> int | None:
    ready = [one["ready"] for one in jobset.get("status", {}).get("replicatedJobsStatus", ())]
    return 0 if sum(ready) == len(jobset["spec"]["replicatedJobs"]) else None


def _lws_is_available(lws: Manifest) -> int | None:
    conditions = lws.get("status", {}).get("conditions", ())
    return 0 if any(one["type"] == "Available" and one["status"] == "True" for one in conditions) else None
