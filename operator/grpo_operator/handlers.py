"""kopf's part: watching, and nothing else. Every event only wakes the job's key in the queue.

Low-level `on.event` handlers alone: they need no finalizer, so a job can be deleted while the operator is down, and write no annotation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import kopf

from grpo_operator import names
from grpo_operator.cluster import Cluster, configure
from grpo_operator.exposition import MetricsServer
from grpo_operator.instruments import Instruments
from grpo_operator.progress import HttpProgress, NoProgress
from grpo_operator.reconcile import Key, Reconciler
from grpo_operator.watched import WatchedJob
from grpo_operator.workqueue import WorkQueue

RESYNC_SECONDS = 3600.0
"""Between two wakes of every job that exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    ask_progress: bool = True
    metrics_port: int | None = None
    read_nodes: bool = True
    network_policies: bool = True


def registry(options: Options) -> kopf.OperatorRegistry:
    """The handlers of one operator, with their queue and clients between them."""
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
    """Kopf as this operator uses it: no events of its own, no discovery of the whole cluster, only our children watched."""
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
    """What lives as long as the operator."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._instruments = Instruments()
        self._metrics: MetricsServer | None = None

    async def start(self, **_: Any) -> None:
        self._cluster = Cluster(await configure(), self._instruments)
        if not await self._cluster.serves_jobs():  # kopf looks for its resources once, and would watch nothing for ever
            await self._cluster.close()
            raise kopf.TemporaryError(f"the cluster has no {names.PLURAL}.{names.GROUP}: kubectl apply -f crds/", delay=5)
        self._progress = HttpProgress() if self._options.ask_progress else NoProgress()
        reconciler = Reconciler(
            self._cluster,
            self._progress,
            lambda: datetime.now(UTC),
            self._instruments,
            read_nodes=self._options.read_nodes,
            network_policies=self._options.network_policies,
        )
        self._last_words = reconciler.last_words
        self._queue: WorkQueue[Key] = WorkQueue(reconciler.reconcile, self._instruments)
        self._resync = asyncio.create_task(self._wake_all(), name="resync")
        if self._options.metrics_port is not None:
            self._metrics = MetricsServer(self._instruments.registry, self._options.metrics_port)
            try:
                await self._metrics.start()
            except OSError as error:
                raise kopf.PermanentError(f"--metrics-port {self._options.metrics_port}: {error.strerror}; choose another") from error

    async def stop(self, **_: Any) -> None:
        self._resync.cancel()
        await self._queue.close()
        await self._cluster.close()
        if isinstance(self._progress, HttpProgress):
            await self._progress.close()
        if self._metrics is not None:
            await self._metrics.close()

    async def job_changed(
        self, namespace: str | None, name: str | None, uid: str | None, event: kopf.RawEvent, spec: kopf.Spec, status: kopf.Status, **_: Any
    ) -> None:
        assert namespace is not None
        assert name is not None
        assert uid is not None
        key = Key(namespace, name, uid)
        if event["type"] == "DELETED":
            self._instruments.gone(key)
        elif spec.get("managedBy", names.CONTROLLER) == names.CONTROLLER:
            self._instruments.jobs.seen(key, WatchedJob.read(namespace, name, status))
        self._queue.wake(key)

    async def pod_changed(self, namespace: str | None, labels: kopf.Labels, event: kopf.RawEvent, **_: Any) -> None:
        if (key := _job_of(namespace, labels)) is not None:
            if event["type"] == "DELETED":
                self._last_words.heard(key, event["object"])
            self._queue.wake(key)

    async def child_changed(self, namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        if (key := _job_of(namespace, labels)) is not None:
            self._queue.wake(key)

    async def _wake_all(self) -> None:
        """A watch that has to begin anew does not tell what was deleted meanwhile: a pass over such a job finds that it is gone."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for key in self._instruments.jobs.keys:
                self._queue.wake(key)

    async def age(self, **_: Any) -> float:
        return asyncio.get_running_loop().time() - self._queue.last_pass


def _job_of(namespace: str | None, labels: kopf.Labels) -> Key | None:
    job, uid = labels.get(names.LABEL_JOB), labels.get(names.LABEL_JOB_UID)
    return Key(namespace, job, uid) if namespace and job and uid else None
