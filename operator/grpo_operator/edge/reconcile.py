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

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.api.spec import parse_spec
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.attempts import is_about_to_begin, is_running_undisturbed, next_attempt
from grpo_operator.decide.blame import Reports, has_unexplained_pods, seems_hung
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.observe import Observed, lost_since, nodes_to_check, observe
from grpo_operator.decide.plan import Mode, Plan, plan, refuse
from grpo_operator.edge.cluster import Cluster, Object
from grpo_operator.edge.deleted_pods import DeletedPods
from grpo_operator.edge.errors import ForbiddenError
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

        Raises ConflictError if the job changed meanwhile and ApiException if the API server fails; the queue retries
        both.
        """
        raw = await self._cluster.get(names.KIND, key.namespace, key.name)
        if raw is None or raw["metadata"]["uid"] != key.uid:
            self._instruments.gone(key)
            self.deleted_pods.forget(key)
            return None
        if "deletionTimestamp" in raw["metadata"]:
            return None
        if raw["spec"].get("managedBy", names.CONTROLLER) != names.CONTROLLER:
            return None
        status = GRPOJobStatus.model_validate(raw.get("status", {}))
        generation = raw["metadata"]["generation"]
        now = self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            spec = parse_spec(raw["spec"])
        except ValueError as error:
            refusal = refuse(status, generation, Reason.INVALID_SPEC, str(error), now)
            return await self._publish(key, raw, status, refusal, now)
        job = Job(namespace=key.namespace, name=key.name, uid=key.uid, generation=generation, spec=spec)
        topology = plan_topology(job)
        observed = await self._observe(job, key, status, now)
        unexplained = is_running_undisturbed(job, status) and has_unexplained_pods(status, observed)
        if unexplained and self.deleted_pods.may_still_arrive(key):
            return DELETION_EVENT_SECONDS
        begins = is_about_to_begin(job, status, observed, now)
        if begins:  # checked live before `plan` begins the attempt
            children = manifests(job, topology, next_attempt(status), policies=self._network_policies)
            if obstacle := await find_obstacle(self._cluster, job, topology, children, self._allowed):
                return await self._publish(key, raw, status, refuse(status, generation, *obstacle, now), now)
        reports = {} if is_terminal(status) else await self._ask(topology, job, observed)
        decided = plan(job, topology, status, observed, reports, now)
        delay = await self._publish(key, raw, status, decided, now)
        self.deleted_pods.recorded(key, observed.gone)
        await self._change_children(job, topology, observed, decided)
        self._instruments.children_applied(key)
        return delay

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

    async def _observe(self, job: Job, key: Key, status: GRPOJobStatus, now: str) -> Observed:
        selector = f"{names.SELECTOR_MANAGED},{names.LABEL_JOB}={job.name}"
        pods = await self._cluster.list("Pod", job.namespace, selector)
        others = [
            child for kind in names.CHILD_KINDS for child in await self._cluster.list(kind, job.namespace, selector)
        ]
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

    async def _change_children(self, job: Job, topology: Topology, observed: Observed, decided: Plan) -> None:
        """Delete pods, apply the children that the plan wants, delete those that it no longer wants."""
        for pod in decided.deletions:
            await self._cluster.delete("Pod", job.namespace, pod.pod, pod.uid, force=pod.force)
        if decided.delete_job:
            await self._cluster.delete(names.KIND, job.namespace, job.name, job.uid)
        if decided.mode == Mode.KEEP or decided.status.attempt is None:
            return
        avoid = [node.name for node in decided.status.avoid_nodes]
        wanted = manifests(job, topology, decided.status.attempt, avoid, policies=self._network_policies)
        seen = {(child.kind, child.name): child.raw for child in observed.children}
        for manifest in wanted:
            if decided.mode != Mode.RUN:
                if manifest["kind"] != "StatefulSet":
                    continue
                is_engine = manifest["metadata"]["labels"][names.LABEL_ROLE] == Role.GENERATION
                if not (is_engine and decided.mode == Mode.ENGINES_ONLY):
                    manifest["spec"]["replicas"] = 0
            await self._cluster.apply(manifest, seen=seen.get((manifest["kind"], manifest["metadata"]["name"])))
        # Not wanted: contracts of earlier attempts, groups removed from the spec during a suspension, a NetworkPolicy
        # switched off.
        kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
        for child in observed.children:
            if (child.kind, child.name) not in kept:
                await self._cluster.delete(child.kind, job.namespace, child.name, child.uid)
