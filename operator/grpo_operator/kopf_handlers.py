"""The operator as kopf runs it: its parts, and the watch of GRPOJobs. Events only wake the job's key in the queue.

Only a low-level `on.event` handler is used: it writes no annotation and needs no finalizer, so a job can be deleted
while the operator is down. The children of jobs are watched by `watches.py`, because a pass must know that the mirror
lacks nothing: kopf does not tell when a list is complete, nor which objects a new list no longer has.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import kopf

from grpo_operator.api import names
from grpo_operator.layout.admission import Allowed
from grpo_operator.metrics.exposition import metrics_page
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.metrics.jobs import WatchedJob
from grpo_operator.passes.launchers import Launchers
from grpo_operator.passes.progress_client import HttpProgress
from grpo_operator.passes.reconcile import Reconciler
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.deleted_pods import DeletedPods
from grpo_operator.runtime.errors import is_temporary
from grpo_operator.runtime.health import ended_tasks, health_page, show_standstill, stuck_passes
from grpo_operator.runtime.http_server import Handler, HttpServer
from grpo_operator.runtime.leader import Leadership
from grpo_operator.runtime.mirror import Key, Mirror, Object
from grpo_operator.runtime.scopes import scopes
from grpo_operator.runtime.transport import Transport, configure
from grpo_operator.runtime.watches import PAGE, Watches
from grpo_operator.runtime.workqueue import WorkQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line."""

    namespaces: tuple[str, ...] = ()  # empty: all
    lease: tuple[str, str] | None = None  # its namespace and name; None: act at once
    identity: str = ""  # in the Lease
    health_port: int = 8080
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
    return handlers


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it posts no events, discovers no other resources, looks for no differences, and lists
    jobs in pages.
    """
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.persistence.diffbase_storage = _NoDiffs()
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.watching.server_timeout = 600
    chosen.watching.client_timeout = 660
    chosen.watching.chunk_size = PAGE
    return chosen


_KINDS = (*names.WATCHED_KINDS, *names.OPTIONAL_KINDS)


class _NoDiffs(kopf.AnnotationsDiffBaseStorage):
    """Copies no job to compare it with its former state: no handler asks what changed."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return {}


class _State:
    """Objects that live as long as the operator."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._instruments = Instruments()
        self._servers: list[HttpServer] = []
        self._tasks: list[asyncio.Task[None]] = []  # none ever ends
        self._passes: Mapping[Key, float] = {}
        self._missing = "the API server has not answered yet"
        self._leadership: Leadership | None = None

    async def start(self, **_: Any) -> None:
        options, instruments = self._options, self._instruments
        if not self._servers:  # else kopf calls again: the API server did not answer, or the CRD was missing
            api = await configure(watches=len(scopes(options.namespaces, _KINDS)))
            if options.lease is not None:
                self._leadership = Leadership(api, *options.lease, options.identity, _end_at_once)
            before_write = self._leadership.check if self._leadership else None
            self._cluster = Cluster(Transport(api, instruments, before_write))
            await self._serve()
        try:
            served = await self._cluster.serves(names.KIND)
            absent = [kind for kind in names.OPTIONAL_KINDS if not await self._cluster.serves(kind)]
        except Exception as error:
            if not is_temporary(error):
                raise
            raise kopf.TemporaryError(f"the API server does not answer: {error}", delay=2) from error
        if not served:  # kopf discovers resources once: it would watch nothing, forever
            self._missing = f"the cluster has no CRD {names.PLURAL}.{names.GROUP}: kubectl apply -f crds/"
            raise kopf.TemporaryError(self._missing, delay=5)
        self._missing = "the pods and other objects of jobs are not read yet"
        watched = scopes(options.namespaces, [kind for kind in _KINDS if kind not in absent])
        deleted_pods: DeletedPods[Key] = DeletedPods(time.monotonic)
        self._mirror = Mirror(watched, self._wake, deleted_pods.remember, self._job_seen, instruments.gone)
        self._watches = Watches(self._cluster, self._mirror, instruments)
        self._progress = HttpProgress() if options.ask_progress else None
        self._launchers = Launchers(self._progress, self._wake, instruments)
        reconciler = Reconciler(
            self._cluster,
            self._mirror,
            self._launchers,
            deleted_pods,
            lambda: datetime.now(UTC),
            instruments,
            read_nodes=options.read_nodes,
            network_policies=options.network_policies,
            allowed=replace(options.allowed, gang=names.GANG_KIND not in absent, queue=names.QUEUE_KIND not in absent),
        )
        self._gate = asyncio.Event()
        self._queue: WorkQueue[Key] = WorkQueue(reconciler.reconcile, instruments, gate=self._gate)
        self._passes = self._queue.started
        instruments.mirror.count = self._mirror.count
        self._watches.start()
        self._tasks = [*self._watches.tasks]
        self._spawn("standstill", show_standstill())
        self._beginning = asyncio.create_task(self._begin(), name="begin")

    async def stop(self, **_: Any) -> None:
        self._beginning.cancel()
        for task in self._tasks:
            task.cancel()
        await self._watches.close()
        await self._queue.close()
        await self._launchers.close()
        if self._leadership is not None:  # nothing is written any more
            await self._leadership.close()
        await self._cluster.close()
        if self._progress is not None:
            await self._progress.close()
        for server in self._servers:
            await server.close()

    async def _begin(self) -> None:
        """Let passes begin once the mirror lacks nothing and, where there is a Lease, this operator holds it."""
        await self._mirror.synced.wait()
        self._missing = ""
        gc.freeze()  # programs and the mirror, among which Python will find no garbage
        if self._leadership is not None:
            self._spawn("leader election", self._leadership.run())
            await self._leadership.leading.wait()
        self._instruments.leads()
        self._gate.set()
        for key in self._mirror.job_keys():
            self._wake(key)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _serve(self) -> None:
        health = {"/healthz": health_page(self._stuck), "/readyz": health_page(self._not_ready)}
        await self._listen("--liveness-port", self._options.health_port, health)
        if self._options.metrics_port is not None:
            metrics = {"/metrics": metrics_page(self._instruments.registry)}
            await self._listen("--metrics-port", self._options.metrics_port, metrics)

    async def _listen(self, option: str, port: int, pages: Mapping[str, Handler]) -> None:
        server = HttpServer(port, pages)
        try:
            await server.start()
        except OSError as error:
            raise kopf.PermanentError(f"{option} {port}: {error.strerror}; choose another port") from error
        self._servers.append(server)

    def _stuck(self) -> Iterator[str]:
        yield from ended_tasks(self._tasks)
        yield from stuck_passes(self._passes, asyncio.get_running_loop().time())

    def _not_ready(self) -> Iterator[str]:
        if self._missing:
            yield self._missing

    async def job_changed(
        self,
        namespace: str | None,
        name: str | None,
        uid: str | None,
        event: kopf.RawEvent,
        **_: Any,
    ) -> None:
        assert namespace is not None
        assert name is not None
        assert uid is not None
        # In kopf's context, whatever waits for this job's sake would keep the job, as dictionaries (`Child.packed`).
        Context().run(self._take_in, Key(namespace, name, uid), event)

    def _take_in(self, key: Key, event: kopf.RawEvent) -> None:
        if event["type"] == "DELETED":
            self._mirror.drop_job(key)
        elif not self._mirror.keep_job(event["object"]):
            return  # the operator's own write, or older: no reason for a pass
        self._wake(key)

    def _wake(self, key: Key) -> None:
        if self._gate.is_set():  # else an operator that stands by would gather passes for as long as it does
            self._queue.wake(key)

    def _job_seen(self, key: Key, raw: Object) -> None:
        if (raw["spec"].get("managedBy") or names.CONTROLLER) == names.CONTROLLER:
            self._instruments.jobs.seen(key, WatchedJob.read(key.namespace, key.name, raw.get("status", {})))


def _end_at_once() -> None:
    """End the process without an orderly end, which takes time: another operator may act from now on."""
    os._exit(1)
