"""One pass over one job: read, plan, one status write, apply, events. Nothing is remembered from pass to pass.

The status is written before any child is touched, as a compare-and-swap on the job's resourceVersion: of two operators that look at
a job at the same time, one gets a conflict and plans again from what the other has written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from grpo_operator import names
from grpo_operator.api import parse_spec
from grpo_operator.builders import manifests
from grpo_operator.cluster import CHILD_KINDS, Cluster, ForeignError, Object, RefusedError
from grpo_operator.jobstatus import GRPOJobStatus
from grpo_operator.names import Reason
from grpo_operator.observe import Observed, observe
from grpo_operator.plan import Plan, plan, refuse
from grpo_operator.progress import ProgressSource
from grpo_operator.status import is_terminal
from grpo_operator.topology import Job, Topology, plan_topology
from grpo_workload.config import dump
from grpo_workload.contract import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """A job by its UID, so that a job made anew under the same name is another job."""

    namespace: str
    name: str
    uid: str


class Reconciler:
    """Brings one job at a time closer to what its spec says."""

    def __init__(self, cluster: Cluster, progress: ProgressSource, clock: Callable[[], datetime]) -> None:
        self._cluster, self._progress, self._clock = cluster, progress, clock

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns the seconds until the next one is due without a wake, None for never.

        Raises ConflictError when the job changed meanwhile, ApiException when the API server fails; the queue tries again.
        """
        raw = await self._cluster.get(names.KIND, key.namespace, key.name)
        if raw is None or raw["metadata"]["uid"] != key.uid or "deletionTimestamp" in raw["metadata"]:
            return None
        status = GRPOJobStatus.model_validate(raw.get("status", {}))
        generation = raw["metadata"]["generation"]
        now = self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            spec = parse_spec(raw["spec"])
        except ValueError as error:
            return await self._carry_out(raw, status, refuse(status, generation, Reason.INVALID_SPEC, str(error), now), now)
        job = Job(namespace=key.namespace, name=key.name, uid=key.uid, generation=generation, spec=spec)
        topology = plan_topology(job)
        if status.epoch is None and (refusal := await self._obstacle(job, topology)):
            return await self._carry_out(raw, status, refuse(status, generation, *refusal, now), now)
        observed = await self._observe(job)
        progress = None if is_terminal(status) else await self._ask(topology, job, observed)
        decided = plan(job, topology, status, observed, progress, now)
        delay = await self._carry_out(raw, status, decided, now)
        await self._bring_children(job, topology, decided)
        return delay

    async def _carry_out(self, raw: Object, old: GRPOJobStatus, decided: Plan, now: str) -> float | None:
        if decided.status != old:
            await self._cluster.write_status(raw, dump(decided.status))
            for event in decided.events:
                log.info("%s/%s: %s: %s", raw["metadata"]["namespace"], raw["metadata"]["name"], event.reason, event.message)
                await self._cluster.emit(raw, kind=event.type, reason=event.reason, message=event.message, now=now)
        return decided.requeue_after

    async def _obstacle(self, job: Job, topology: Topology) -> tuple[str, str] | None:
        """Why the job cannot be accepted, as far as the cluster knows: found out before its spec is frozen."""
        if reason := await self._claim_obstacle(job, topology):
            return reason
        try:
            for manifest in manifests(job, topology, 0):
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

    async def _observe(self, job: Job) -> Observed:
        selector = f"{names.SELECTOR_MANAGED},{names.LABEL_JOB}={job.name}"
        pods = await self._cluster.list("Pod", job.namespace, selector)
        others = [child for kind in CHILD_KINDS for child in await self._cluster.list(kind, job.namespace, selector)]
        return observe(job.uid, pods=pods, others=others)

    async def _ask(self, topology: Topology, job: Job, observed: Observed) -> Progress | None:
        master = observed.pods.get(topology.members[0].pod)
        if master is None or master.ip is None or master.outcome is not None:
            return None
        return await self._progress.fetch(master.ip, job.spec.rendezvous.status_port)

    async def _bring_children(self, job: Job, topology: Topology, decided: Plan) -> None:
        if decided.replicas == "keep" or decided.status.epoch is None:
            return
        for manifest in manifests(job, topology, decided.status.epoch):
            if decided.replicas == "zero":
                if manifest["kind"] != "StatefulSet":
                    continue
                manifest["spec"]["replicas"] = 0
            await self._cluster.apply(manifest)
