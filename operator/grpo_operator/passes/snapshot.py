"""A pass's knowledge of a job: read from the mirror, or live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from grpo_operator.api import names
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.site import Layers
from grpo_operator.api.status import GRPOJobStatus, read_status
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.objects import owner_of
from grpo_operator.decide.observe import (
    KINDS_WITH_PODS,
    Child,
    Observed,
    lost_since,
    nodes_to_check,
    observe,
    read_child,
    read_pods,
)
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology, plan_topology
from grpo_operator.passes.absent import AbsentPods
from grpo_operator.passes.children import error_note
from grpo_operator.passes.jobs import Jobs, Understood
from grpo_operator.passes.kueue import read_granted
from grpo_operator.passes.read_job import queue_label, read_job
from grpo_operator.passes.site import read_layers
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ConflictError, ForbiddenError, ObstacleError
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.transport import Object

NODE_SECONDS = 2.0
"""Seconds for which passes that plan from the mirror share what was read of a node."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job and its children at one moment, for planning."""

    raw: Object
    status: GRPOJobStatus
    job: Job
    topology: Topology
    observed: Observed
    now: datetime


class SnapshotReader:
    """Reads snapshots of jobs.

    `read_nodes`: whether the nodes of silent pods are read. `requests`: what pods of new jobs request. `site`: the
    kinds of what a site sets that hold for new jobs.
    """

    def __init__(
        self,
        cluster: Cluster,
        mirror: Mirror,
        jobs: Jobs,
        *,
        read_nodes: bool,
        requests: PodRequests | None = None,
        site: Sequence[str] = (),
    ) -> None:
        self._cluster, self._mirror, self._jobs, self._read_nodes = cluster, mirror, jobs, read_nodes
        self._requests, self._site = requests, site
        self._nodes: dict[str, tuple[float, Object | None]] = {}
        self._absent = AbsentPods(cluster, jobs)

    async def mirrored(self, key: Key, raw: Object, now: datetime) -> Snapshot:
        """Return what the mirror shows; `raw` is the job there."""
        return await self._snapshot(key, raw, self._mirror.pods(key), now, NODE_SECONDS)

    async def live(self, key: Key, seen: Snapshot) -> Snapshot:
        """Return the job, its pods and their nodes as the API server shows them now.

        Raises ConflictError if the job has changed.
        """
        with error_note("reading the job's pods"):
            pods = read_pods(await children(self._cluster, key, "Pod"))
        # The job comes second: a pod of an attempt that began after it was read would look like one to delete. A field
        # that the CRD got meanwhile may show although the job's version is the same.
        raw = await self.check_current(key, seen.raw)
        raw |= {"status": seen.raw.get("status")}  # of the same version, with what an older CRD drops
        return await self._snapshot(key, raw, pods, seen.now, 0.0)

    async def check_current(self, key: Key, raw: Object) -> Object:
        """Return the job as the API server shows it. Raises ConflictError if it is no longer what the mirror showed."""
        live = await self.read(key)
        if live is None or live["metadata"]["resourceVersion"] != raw["metadata"]["resourceVersion"]:
            raise ConflictError("the mirror was behind")
        return live

    async def read(self, key: Key) -> Object | None:
        """Read a job from the API server, and keep it in the mirror."""
        raw = await self._cluster.get(names.KIND, key.namespace, key.name)
        if raw is None or raw["metadata"]["uid"] != key.uid:
            self._mirror.drop_job(key)
            return None
        self._mirror.renew_job(raw)
        return raw

    async def _snapshot(
        self, key: Key, raw: Object, pods: list[tuple[str, ObservedPod]], now: datetime, age: float
    ) -> Snapshot:
        status = read_status(raw.get("status"))
        layers = await self._layers(key, status)
        with error_note("reading the spec"):
            job, topology = self._understand(key, raw, status, layers)
        if not is_terminal(status):
            self._check_lists(job, status)
        observed = await self._observe(key, status, pods, now, age)
        observed = await self._absent.explain(key, status, topology, observed)
        if is_between_attempts(status):
            job = replace(job, admission=await read_granted(self._cluster, job, topology, observed))
        return Snapshot(raw, status, job, topology, observed, now)

    def _check_lists(self, job: Job, status: GRPOJobStatus) -> None:
        """Raise ObstacleError if the API server does not list a kind that this job needs."""
        queued = job.queue is not None or status.admission is not None
        for kind, is_needed in ((names.GANG_KIND, job.spec.scheduling.gang is not None), (names.QUEUE_KIND, queued)):
            scope = self._mirror.scope(kind, job.namespace)
            if is_needed and scope is not None and scope.obstacle is not None:
                with error_note(f"reading the job's {kind}"):
                    raise ObstacleError(scope.obstacle.reason, str(scope.obstacle))

    async def _layers(self, key: Key, status: GRPOJobStatus) -> Layers:
        """Return what the site sets for the job: as it is now, until the job has begun or waits for its turn."""
        if status.attempt is not None or status.pod_requests is not None or is_terminal(status):
            return status.site or {}
        with error_note("reading what the site sets"):
            return await read_layers(self._cluster, self._site, key.namespace)

    def _understand(self, key: Key, raw: Object, status: GRPOJobStatus, layers: Layers) -> tuple[Job, Topology]:
        old = self._jobs.of(key).understood
        basis = raw["spec"], status.defaults, layers, queue_label(raw)
        if old is not None and old.stored.fault is None and old.basis == basis:
            stored = old.stored
        else:
            stored = read_spec(raw["spec"], status, layers, queue_label(raw))  # at fault: the status stands in
        job = read_job(key, raw, status, stored, self._requests, layers)
        topology = old.topology if old is not None and job == old.job else plan_topology(job)
        self._jobs.understand(key, Understood(basis, stored, job, topology))
        return job, topology

    async def _observe(
        self, key: Key, status: GRPOJobStatus, pods: list[tuple[str, ObservedPod]], now: datetime, age: float
    ) -> Observed:
        others = self._mirror.others(key)
        others += await self._missing_sets(key, pods, others)
        state = self._jobs.of(key)
        queues = self._mirror.scope(names.QUEUE_KIND, key.namespace)
        has_queues = queues is not None and queues.is_listed
        observed = observe(
            key.uid,
            pods=pods,
            others=others,
            gone=state.deleted_pods.seen(now),
            over=status.over,
            members={member.uid for member in status.members},
            gone_sets=state.gone_sets,
        )
        observed = replace(observed, has_queues=has_queues)
        lost, absent, ready = {}, set(), set()
        was_running = status.running_time is not None or status.pods_attempt is not None
        suspects = nodes_to_check(observed, was_running=was_running) if self._read_nodes else ()
        for name in sorted(suspects):
            try:
                node = await self._node(name, age)
            except ForbiddenError:
                break  # without the right to read nodes, a lost node shows later: Kubernetes evicts its pods
            if node is None:
                absent.add(name)
            if (since := lost_since(node, now)) is not None:
                lost[name] = since
            else:
                ready.add(name)
        return replace(observed, lost_nodes=lost, absent_nodes=frozenset(absent), ready_nodes=frozenset(ready))

    async def _missing_sets(
        self, key: Key, pods: list[tuple[str, ObservedPod]], others: list[tuple[str, Child]]
    ) -> list[tuple[str, Child]]:
        """Read the StatefulSets and Jobs that pods name as their controller and the mirror lacks, each after the UID
        of its owner: it may have lost its label. Those that no longer exist are noted.
        """
        known, found = {child.uid for _, child in others} | self._jobs.of(key).gone_sets, []
        missing = {(*pod.controller_place, pod.controller) for _, pod in pods if pod.controller not in ("", *known)}
        for kind, name, uid in sorted(missing):
            if kind not in KINDS_WITH_PODS:
                continue  # somebody else's
            with error_note(f"reading {kind} {name}"):
                live = await self._cluster.find(kind, key.namespace, name)
            if live is None or live["metadata"]["uid"] != uid:
                self._jobs.of(key).gone_sets.add(uid)
            else:
                found.append((owner_of(live, key.name), read_child(kind, live)))
        return found

    async def _node(self, name: str, age: float) -> Object | None:
        """Return a node as read at most `age` seconds ago."""
        at, node = self._nodes.get(name, (-age, None))
        if (time := asyncio.get_running_loop().time()) - at >= age:
            with error_note(f"reading the node {name}"):
                node = await self._cluster.node(name)
            self._nodes = {one: kept for one, kept in self._nodes.items() if time - kept[0] < NODE_SECONDS}
            self._nodes[name] = time, node
        return node


async def children(cluster: Cluster, key: Key, kind: str) -> list[Object]:
    """Return the objects of a kind that carry the job's label, whoever owns them."""
    return await cluster.list(kind, key.namespace, f"{names.SELECTOR_MANAGED},{names.LABEL_JOB}={key.name}")


def is_ours(raw: Object) -> bool:
    """Whether this operator acts on the job: it is not being deleted, and no other controller manages it."""
    manager = raw["spec"].get("managedBy") or names.CONTROLLER
    return "deletionTimestamp" not in raw["metadata"] and manager == names.CONTROLLER
