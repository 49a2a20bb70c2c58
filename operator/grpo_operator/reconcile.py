"""One pass over one job: read, plan, one status write, apply, events. Nothing is remembered from pass to pass but last words of pods.

The status is written before any child is touched, as a compare-and-swap on the job's resourceVersion: of two operators that look at
a job at the same time, one gets a conflict and plans again from what the other has written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from grpo_operator import names
from grpo_operator.api import parse_spec
from grpo_operator.builders import manifests
from grpo_operator.cluster import CHILD_KINDS, Cluster, ForbiddenError, ForeignError, Object, RefusedError
from grpo_operator.instruments import Instruments
from grpo_operator.jobstatus import GRPOJobStatus
from grpo_operator.lastwords import LastWords
from grpo_operator.lifecycle import is_between_epochs, is_left_alone, may_begin, next_epoch
from grpo_operator.names import Reason, Role
from grpo_operator.observe import Observed, lost_since, observe, suspects
from grpo_operator.plan import Plan, plan, refuse
from grpo_operator.progress import ProgressSource
from grpo_operator.status import is_terminal
from grpo_operator.topology import Job, Topology, plan_topology
from grpo_operator.verdict import Reports, are_unheard_of, seems_hung
from grpo_workload.contract import Progress
from grpo_workload.section import dump

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
"""Between two looks at a job of which a pod is gone, and the watch has not said how; hearing of it wakes the job too."""


@dataclass(frozen=True, slots=True)
class Key:
    """A job by its UID, so that a job made anew under the same name is another job."""

    namespace: str
    name: str
    uid: str


class Reconciler:
    """Brings one job at a time closer to what its spec says.

    `read_nodes`: whether nodes of silent pods are looked at; `network_policies`: whether jobs get theirs, or lose what they have.
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
    ) -> None:
        self._cluster, self._progress, self._clock, self._instruments = cluster, progress, clock, instruments
        self._read_nodes, self._network_policies = read_nodes, network_policies
        self.last_words: LastWords[Key] = LastWords(time.monotonic)

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns the seconds until the next one is due without a wake, None for never.

        Raises ConflictError when the job changed meanwhile, ApiException when the API server fails; the queue tries again.
        """
        raw = await self._cluster.get(names.KIND, key.namespace, key.name)
        if raw is None or raw["metadata"]["uid"] != key.uid:
            self._instruments.gone(key)
            self.last_words.forget(key)
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
            return await self._carry_out(key, raw, status, refuse(status, generation, Reason.INVALID_SPEC, str(error), now), now)
        job = Job(namespace=key.namespace, name=key.name, uid=key.uid, generation=generation, spec=spec)
        topology = plan_topology(job)
        observed = await self._observe(job, key, status, now)
        if is_left_alone(job, status) and are_unheard_of(status, observed) and self.last_words.may_come(key):
            return LAST_WORDS_SECONDS
        if _is_about_to_begin(job, status, observed, now) and (refusal := await self._obstacle(job, topology, next_epoch(status))):
            return await self._carry_out(key, raw, status, refuse(status, generation, *refusal, now), now)
        reports = {} if is_terminal(status) else await self._ask(topology, job, observed)
        decided = plan(job, topology, status, observed, reports, now)
        delay = await self._carry_out(key, raw, status, decided, now)
        self.last_words.taken_down(key, observed.gone)
        await self._bring_children(job, topology, observed, decided)
        self._instruments.children_applied(key)
        return delay

    async def _carry_out(self, key: Key, raw: Object, old: GRPOJobStatus, decided: Plan, now: str) -> float | None:
        if decided.status != old:
            await self._cluster.write_status(raw, dump(decided.status))
            self._measure(key, raw, old, decided.status)
            for event in decided.events:
                log.info("%s/%s: %s: %s", raw["metadata"]["namespace"], raw["metadata"]["name"], event.reason, event.message)
                await self._cluster.emit(raw, kind=event.type, reason=event.reason, message=event.message, now=now)
        return decided.requeue_after

    def _measure(self, key: Key, raw: Object, old: GRPOJobStatus, new: GRPOJobStatus) -> None:
        self._instruments.status_written(key)
        if new.restarts.total > old.restarts.total and new.last_failure is not None:
            self._instruments.restarted(key.namespace, new.last_failure.reason)
        if new.epoch != old.epoch:
            created = datetime.fromisoformat(raw["metadata"]["creationTimestamp"])
            # A job that was changed before it began, to be mended or to be resumed, has waited for its user.
            fresh = new.epoch == 0 and new.observed_generation == 1
            self._instruments.attempt_begun(key, waited=(self._clock() - created).total_seconds() if fresh else None)

    async def _obstacle(self, job: Job, topology: Topology, epoch: int) -> tuple[str, str] | None:
        """Why the next attempt cannot begin, as far as the cluster knows: found out before the spec is frozen."""
        if reason := await self._claim_obstacle(job, topology):
            return reason
        try:
            for manifest in manifests(job, topology, epoch, policies=self._network_policies):
                await self._cluster.apply(manifest, dry_run=True)
        except ForeignError as error:
            return Reason.NAME_TAKEN, str(error)
        except RefusedError as error:
            return Reason.INVALID_POD_TEMPLATE, f"the API server refuses what spec.podTemplate makes: {error}"
        return None

    async def _claim_obstacle(self, job: Job, topology: Topology) -> tuple[str, str] | None:
        for field, name in (("storage", job.spec.storage.claim_name), ("cache", job.spec.cache.claim_name)):
            if name is None:
                continue
            claim = await self._cluster.get("PersistentVolumeClaim", job.namespace, name)
            if claim is None:
                return (
                    Reason.CLAIM_NOT_FOUND,
                    f"spec.{field}.claimName: there is no PersistentVolumeClaim {name} in {job.namespace}; create it",
                )
            modes = claim["spec"].get("accessModes", [])
            if len(topology.members) > 1 and "ReadWriteMany" not in modes:
                who, found = f"{len(topology.members)} pods write to {name}", ", ".join(modes)
                return Reason.CLAIM_NOT_SHARED, f"spec.{field}.claimName: {who}, whose access modes are {found}; use ReadWriteMany"
        return None

    async def _observe(self, job: Job, key: Key, status: GRPOJobStatus, now: str) -> Observed:
        selector = f"{names.SELECTOR_MANAGED},{names.LABEL_JOB}={job.name}"
        pods = await self._cluster.list("Pod", job.namespace, selector)
        others = [child for kind in CHILD_KINDS for child in await self._cluster.list(kind, job.namespace, selector)]
        observed = observe(job.uid, pods=pods, others=others, gone=self.last_words.of(key))
        lost, absent = {}, set()
        looked_at = suspects(observed, was_running=status.running_time is not None) if self._read_nodes else ()
        for name in sorted(looked_at):
            try:
                node = await self._cluster.node(name)
            except ForbiddenError:  # roles without nodes: pods that overstay their grace tell as much, later
                break
            if node is None:
                absent.add(name)
            if (since := lost_since(node, now)) is not None:
                lost[name] = since
        return replace(observed, lost_nodes=lost, absent_nodes=frozenset(absent))

    async def _ask(self, topology: Topology, job: Job, observed: Observed) -> Reports:
        """Rank 0's launcher, and all others when it says that nothing moves."""
        master = topology.members[0].pod
        reports = await self._fetch(job, observed, [master])
        if seems_hung(reports.get(master), job.spec.failure_policy):
            reports |= await self._fetch(job, observed, [member.pod for member in topology.members[1:]])
        return reports

    async def _fetch(self, job: Job, observed: Observed, names_of_pods: Sequence[str]) -> dict[str, Progress]:
        pods = [observed.pods[name] for name in names_of_pods if name in observed.pods]
        running = [(pod.name, pod.ip) for pod in pods if pod.ip is not None and pod.outcome is None]
        port = job.spec.rendezvous.status_port
        told = await asyncio.gather(*(self._progress.fetch(ip, port) for _, ip in running))
        for progress in told:
            self._instruments.asked(answered=progress is not None)
        return {name: progress for (name, _), progress in zip(running, told, strict=True) if progress is not None}

    async def _bring_children(self, job: Job, topology: Topology, observed: Observed, decided: Plan) -> None:
        for pod in decided.deletions:
            await self._cluster.delete("Pod", job.namespace, pod.pod, pod.uid, force=pod.force)
        if decided.delete_job:
            await self._cluster.delete(names.KIND, job.namespace, job.name, job.uid)
        if decided.replicas == "keep" or decided.status.epoch is None:
            return
        avoid = [node.name for node in decided.status.avoid_nodes]
        wanted = manifests(job, topology, decided.status.epoch, avoid, policies=self._network_policies)
        seen = {(child.kind, child.name): child.raw for child in observed.children}
        for manifest in wanted:
            if decided.replicas != "run":
                if manifest["kind"] != "StatefulSet":
                    continue
                engine = manifest["metadata"]["labels"][names.LABEL_ROLE] == Role.GENERATION
                if not (engine and decided.replicas == "engines"):
                    manifest["spec"]["replicas"] = 0
            await self._cluster.apply(manifest, seen=seen.get((manifest["kind"], manifest["metadata"]["name"])))
        # Contracts of earlier epochs, groups taken out of the spec while the job was suspended, a policy that is no longer wanted.
        kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
        for child in observed.children:
            if (child.kind, child.name) not in kept:
                await self._cluster.delete(child.kind, job.namespace, child.name, child.uid)


def _is_about_to_begin(job: Job, status: GRPOJobStatus, observed: Observed, now: str) -> bool:
    if is_terminal(status) or job.spec.suspend:
        return False
    return is_between_epochs(status) and may_begin(status, observed, now)
