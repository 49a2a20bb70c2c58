"""One pass over one job: read, plan, write the status once, emit events, change children.

A pass keeps no state except the final state of pods just deleted. The status is written before any child is touched, as
a compare-and-swap on the job's resourceVersion: if two operators plan at the same time, one gets a conflict and plans
again from what the other wrote.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus, read_status
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.decide.attempts import is_about_to_begin, is_running_undisturbed, next_attempt
from grpo_operator.decide.blame import Reports, has_unexplained_pods, seems_hung
from grpo_operator.decide.conditions import holds, is_terminal
from grpo_operator.decide.observe import Observed, lost_since, nodes_to_check, observe
from grpo_operator.decide.plan import Obstacle, Plan, plan
from grpo_operator.decide.rescue import recovered, rescue
from grpo_operator.edge.children import change_children, doing, stop_groups
from grpo_operator.edge.cluster import Cluster, Object
from grpo_operator.edge.deleted_pods import DeletedPods
from grpo_operator.edge.errors import ForbiddenError, ObstacleError, is_temporary, reason_of
from grpo_operator.edge.obstacles import find_obstacle
from grpo_operator.edge.progress_client import ProgressSource
from grpo_operator.layout.admission import Allowed
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import Job, Topology, plan_topology
from grpo_operator.metrics.instruments import Instruments
from grpo_workload.spec.contract import Progress
from grpo_workload.spec.reasons import Reason
from grpo_workload.spec.schema import dump

log = logging.getLogger(__name__)

DELETION_EVENT_SECONDS = 0.5
"""Seconds to the next pass while a pod is gone and the watch has not delivered its deletion yet; the event wakes the
job too."""


@dataclass(frozen=True, slots=True)
class Key:
    """A job by its UID: a job recreated under the same name is another job."""

    namespace: str
    name: str
    uid: str


class Reconciler:
    """Brings one job at a time closer to its spec.

    `read_nodes`: whether the nodes of silent pods are read. `network_policies`: whether jobs get a NetworkPolicy; if
    not, existing ones are deleted. `allowed`: what podTemplate may hold.
    """

    def __init__(
        self,
        cluster: Cluster,
        progress: ProgressSource,
        clock: Callable[[], datetime],
        instruments: Instruments,
        *,
        read_nodes: bool = True,
        network_policies: bool = True,
        allowed: Allowed,
    ) -> None:
        self._cluster, self._progress, self._clock, self._instruments = cluster, progress, clock, instruments
        self._read_nodes, self._network_policies, self._allowed = read_nodes, network_policies, allowed
        self.deleted_pods: DeletedPods[Key] = DeletedPods(time.monotonic)

    async def reconcile(self, key: Key) -> float | None:
        """Do one pass. Return the seconds until the next one is due, or None if only a change calls for it.

        Raises ConflictError if the job changed meanwhile, and whatever else made the pass fail; the queue tries again.
        Unless the API server is at fault for the moment, the job's condition Blocked then names what failed.
        """
        raw = await self._read(key)
        if raw is None:
            self._instruments.gone(key)
            self.deleted_pods.forget(key)
            return None
        if not is_ours(raw):
            return None
        try:
            return await self._pass(key, raw)
        except Exception as error:
            if not is_temporary(error):
                await self._rescue(key, error)
            raise

    async def _pass(self, key: Key, raw: Object) -> float | None:
        now = self._now()
        status = read_status(raw.get("status"))
        with doing("reading the spec"):
            job = _read_job(key, raw, status)
            topology = plan_topology(job)
        with doing("reading the job's pods and other objects"):
            observed = await self._observe(job, key, status, now)
        unexplained = is_running_undisturbed(job, status) and has_unexplained_pods(status, observed)
        if unexplained and self.deleted_pods.may_still_arrive(key):
            return DELETION_EVENT_SECONDS
        with doing("checking whether an attempt can begin"):
            obstacle = await self._find_obstacle(job, topology, status, observed, now)
        reports = {} if is_terminal(status) else await self._ask(topology, job, observed)
        with doing("planning"):
            decided = plan(job, topology, status, observed, reports, now, obstacle)
        delay = await self._publish(key, raw, status, decided, now)
        self.deleted_pods.recorded(key, observed.gone)
        await change_children(self._cluster, job, topology, observed, decided, policies=self._network_policies)
        self._instruments.children_applied(key)
        if holds(decided.status, Condition.BLOCKED) and (latest := await self._read(key)) is not None:
            status = recovered(job, read_status(latest.get("status")), now)
            await self._cluster.write_status(latest, dump(status))
        return delay

    async def _rescue(self, key: Key, error: Exception) -> None:
        """Say on the job what failed, and do what can be done nevertheless."""
        raw = await self._read(key)
        if raw is None:
            return
        status, now = read_status(raw.get("status")), self._now()
        job = _read_job(key, raw, status)
        pods = {
            pod["metadata"]["name"]: pod["metadata"]["labels"].get(names.LABEL_ROLE, "")
            for pod in await self._children(job, "Pod")
        }
        decided = rescue(job, status, pods, _say(error), now)
        await self._publish(key, raw, status, decided, now)
        await stop_groups(self._cluster, job, await self._children(job, "StatefulSet"), decided.mode)

    async def _read(self, key: Key) -> Object | None:
        raw = await self._cluster.get(names.KIND, key.namespace, key.name)
        return raw if raw is not None and raw["metadata"]["uid"] == key.uid else None

    def _now(self) -> str:
        return self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def _publish(self, key: Key, raw: Object, old: GRPOJobStatus, decided: Plan, now: str) -> float | None:
        """Write the status and its events, if anything changed. Return the seconds until the next pass is due."""
        if decided.status != old:
            await self._cluster.write_status(raw, dump(decided.status))
            self._measure(key, raw, old, decided.status)
            for event in decided.events:
                log.info(
                    "%s/%s: %s: %s", raw["metadata"]["namespace"], raw["metadata"]["name"], event.reason, event.message
                )
                await self._cluster.emit(raw, kind=event.type, reason=event.reason, message=event.message, now=now)
        return decided.requeue_after

    def _measure(self, key: Key, raw: Object, old: GRPOJobStatus, new: GRPOJobStatus) -> None:
        self._instruments.status_written(key)
        if new.restarts.total > old.restarts.total and new.last_failure is not None:
            self._instruments.restarted(key.namespace, new.last_failure.reason)
        if new.attempt != old.attempt:
            created = datetime.fromisoformat(raw["metadata"]["creationTimestamp"])
            # A job whose spec was changed before its first attempt (fixed, or resumed) waited for its user, not for the
            # operator.
            fresh = new.attempt == 0 and new.observed_generation == 1
            self._instruments.attempt_begun(key, waited=(self._clock() - created).total_seconds() if fresh else None)

    async def _find_obstacle(
        self, job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed, now: str
    ) -> Obstacle | None:
        """Return why the attempt that is about to begin cannot, or None; checked live before each attempt."""
        if job.fault is not None or not is_about_to_begin(job, status, observed, now):
            return None
        try:
            children = manifests(job, topology, next_attempt(status), policies=self._network_policies)
        except ValueError as error:
            return Obstacle(Reason.INVALID_POD_TEMPLATE, str(error))
        found = await find_obstacle(self._cluster, job, topology, children, self._allowed)
        return None if found is None else Obstacle(*found)

    async def _children(self, job: Job, kind: str) -> list[Object]:
        """Return the objects of a kind that carry the job's label, those of an earlier job of this name too."""
        return await self._cluster.list(kind, job.namespace, f"{names.SELECTOR_MANAGED},{names.LABEL_JOB}={job.name}")

    async def _observe(self, job: Job, key: Key, status: GRPOJobStatus, now: str) -> Observed:
        pods = await self._children(job, "Pod")
        others = [child for kind in names.CHILD_KINDS for child in await self._children(job, kind)]
        observed = observe(job.uid, pods=pods, others=others, gone=self.deleted_pods.of(key))
        lost, absent, ready = {}, set(), set()
        suspects = nodes_to_check(observed, was_running=status.running_time is not None) if self._read_nodes else ()
        for name in sorted(suspects):
            try:
                node = await self._cluster.node(name)
            except ForbiddenError:
                break  # without the right to read nodes, a lost node shows later: Kubernetes evicts its pods
            if node is None:
                absent.add(name)
            if (since := lost_since(node, now)) is not None:
                lost[name] = since
            else:
                ready.add(name)
        return replace(observed, lost_nodes=lost, absent_nodes=frozenset(absent), ready_nodes=frozenset(ready))

    async def _ask(self, topology: Topology, job: Job, observed: Observed) -> Reports:
        """Ask rank 0's launcher for its progress, and all others too if the job seems hung."""
        master = topology.members[0].pod
        reports = await self._fetch(job, observed, [master])
        if seems_hung(reports.get(master), job.spec.failure_policy):
            reports |= await self._fetch(job, observed, [member.pod for member in topology.members[1:]])
        return reports

    async def _fetch(self, job: Job, observed: Observed, names_of_pods: Sequence[str]) -> dict[str, Progress]:
        pods = [observed.pods[name] for name in names_of_pods if name in observed.pods]
        running = [(pod.name, pod.ip) for pod in pods if pod.ip is not None and pod.outcome is None]
        port = job.spec.rendezvous.status_port
        answers = await asyncio.gather(*(self._progress.fetch(ip, port) for _, ip in running))
        for progress in answers:
            self._instruments.asked(answered=progress is not None)
        return {name: progress for (name, _), progress in zip(running, answers, strict=True) if progress is not None}


def is_ours(raw: Object) -> bool:
    """Whether this operator acts on the job: it is not being deleted, and no other controller manages it."""
    manager = raw["spec"].get("managedBy") or names.CONTROLLER
    return "deletionTimestamp" not in raw["metadata"] and manager == names.CONTROLLER


def _read_job(key: Key, raw: Object, status: GRPOJobStatus) -> Job:
    stored = read_spec(raw["spec"], status)
    return Job(
        namespace=key.namespace,
        name=key.name,
        uid=key.uid,
        generation=raw["metadata"]["generation"],
        spec=stored.spec,
        fault=stored.fault,
        ignored=stored.ignored,
        micro_batch_halvings=status.micro_batch_halvings,
    )


def _say(error: Exception) -> Obstacle:
    """Return the reason and the message of `Blocked`."""
    what = "; ".join(getattr(error, "__notes__", ())) or "a pass over the job"
    if isinstance(error, ObstacleError):
        return Obstacle(error.reason, f"{what} failed, and is tried again: {error}")
    said = reason_of(error) if isinstance(error, ApiException) else error
    return Obstacle(Reason.PASS_FAILED, f"{what} failed with {type(error).__name__}, and is tried again: {said}")
