"""Watching, with kopf. Every event only wakes the job's key in the queue.

Only low-level `on.event` handlers are used: they write no annotation and need no finalizer, so a job can be deleted
while the operator is down.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import kopf

from grpo_operator.api import names
from grpo_operator.edge.cluster import Cluster, configure
from grpo_operator.edge.progress_client import HttpProgress, NoProgress
from grpo_operator.edge.reconcile import Key, Reconciler
from grpo_operator.edge.workqueue import WorkQueue
from grpo_operator.layout.admission import Allowed
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.metrics.jobs import WatchedJob
from grpo_operator.metrics.server import MetricsServer

RESYNC_SECONDS = 3600.0
"""Seconds between two wakes of every existing job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line."""

    ask_progress: bool = True
    metrics_port: int | None = None
    read_nodes: bool = True
    network_policies: bool = True
    allowed: Allowed = field(default_factory=Allowed)


def registry(options: Options) -> kopf.OperatorRegistry:
    """Return the handlers of one operator, which share a queue and clients."""
    handlers = kopf.OperatorRegistry()
    state = _State(options)
    kopf.on.login(registry=handlers)(kopf.login_via_client)
    kopf.on.startup(registry=handlers)(state.start)
    kopf.on.cleanup(registry=handlers)(state.stop)
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=handlers)(state.job_changed)
    kopf.on.event("apps", "v1", "statefulsets", registry=handlers)(state.child_changed)
    kopf.on.event("", "v1", "pods", registry=handlers)(state.pod_changed)
    kopf.on.probe(id="seconds_since_last_pass", registry=handlers)(state.age)
    return handlers


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it posts no events, discovers no other resources and watches only our children."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.watching.server_timeout = 600
    chosen.watching.client_timeout = 660
    chosen.watching.label_selectors["apps", "v1", "statefulsets"] = names.SELECTOR_MANAGED
    chosen.watching.label_selectors["", "v1", "pods"] = names.SELECTOR_MANAGED
    return chosen


class _State:
    """Objects that live as long as the operator."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._instruments = Instruments()
        self._metrics: MetricsServer | None = None

    async def start(self, **_: Any) -> None:
        self._cluster = Cluster(await configure(), self._instruments)
        if not await self._cluster.serves_jobs():  # kopf discovers resources once: it would watch nothing, forever
            await self._cluster.close()
            raise kopf.TemporaryError(
                f"the cluster has no CRD {names.PLURAL}.{names.GROUP}: kubectl apply -f crds/", delay=5
            )
        self._progress = HttpProgress() if self._options.ask_progress else NoProgress()
        reconciler = Reconciler(
            self._cluster,
            self._progress,
            lambda: datetime.now(UTC),
            self._instruments,
            read_nodes=self._options.read_nodes,
            network_policies=self._options.network_policies,
            allowed=self._options.allowed,
        )
        self._deleted_pods = reconciler.deleted_pods
        self._queue: WorkQueue[Key] = WorkQueue(reconciler.reconcile, self._instruments)
        self._resync = asyncio.create_task(self._wake_all(), name="resync")
        if self._options.metrics_port is not None:
            self._metrics = MetricsServer(self._instruments.registry, self._options.metrics_port)
            try:
                await self._metrics.start()
            except OSError as error:
                raise kopf.PermanentError(
                    f"--metrics-port {self._options.metrics_port}: {error.strerror}; choose another port"
                ) from error

    async def stop(self, **_: Any) -> None:
        self._resync.cancel()
        await self._queue.close()
        await self._cluster.close()
        if isinstance(self._progress, HttpProgress):
            await self._progress.close()
        if self._metrics is not None:
            await self._metrics.close()

    async def job_changed(
        self,
        namespace: str | None,
        name: str | None,
        uid: str | None,
        event: kopf.RawEvent,
        spec: kopf.Spec,
        status: kopf.Status,
        **_: Any,
    ) -> None:
        assert namespace is not None
        assert name is not None
        assert uid is not None
        key = Key(namespace, name, uid)
        self._queue.wake(key)
        if event["type"] == "DELETED":
            self._instruments.gone(key)
        elif spec.get("managedBy", names.CONTROLLER) == names.CONTROLLER:
            self._instruments.jobs.seen(key, WatchedJob.read(namespace, name, status))

    async def pod_changed(self, namespace: str | None, labels: kopf.Labels, event: kopf.RawEvent, **_: Any) -> None:
        if (key := _job_of(namespace, labels)) is not None:
            if event["type"] == "DELETED":
                self._deleted_pods.remember(key, event["object"])
            self._queue.wake(key)

    async def child_changed(self, namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        if (key := _job_of(namespace, labels)) is not None:
            self._queue.wake(key)

    async def _wake_all(self) -> None:
        """Wake every job now and then: a watch that restarts misses deletions, and a pass finds the job gone."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for key in self._instruments.jobs.keys:
                self._queue.wake(key)

    async def age(self, **_: Any) -> float:
        return asyncio.get_running_loop().time() - self._queue.last_pass


def _job_of(namespace: str | None, labels: kopf.Labels) -> Key | None:
    job, uid = labels.get(names.LABEL_JOB), labels.get(names.LABEL_JOB_UID)
    return Key(namespace, job, uid) if namespace and job and uid else None
