"""The operator as kopf runs it: settings, the watch of GRPOJobs, start and end.

Only a low-level `on.event` handler is used: it writes no annotation and needs no finalizer, so a job can be deleted
while the operator is down. The children of jobs are watched by `watches.py`, because a pass must know that the mirror
lacks nothing: kopf does not tell when a list is complete, nor which objects a new list no longer has.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import kopf

from grpo_operator.api import names
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.layout.admission import Allowed
from grpo_operator.metrics.exposition import metrics_page
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.progress_client import HttpProgress
from grpo_operator.passes.reconcile import PassOptions
from grpo_operator.passes.site import Judge, say_what_is_absent
from grpo_operator.program import Program
from grpo_operator.runtime.check import describe_lack, find_missing, lacking_fields
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.complaints import Complaints
from grpo_operator.runtime.health import ended_tasks, health_page, show_standstill
from grpo_operator.runtime.http_server import Handler, HttpServer
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.leader import Leadership
from grpo_operator.runtime.scopes import scopes, site_kinds
from grpo_operator.runtime.transport import Transport, configure
from grpo_operator.runtime.watches import PAGE

log = logging.getLogger(__name__)

START_SECONDS = 2.0
"""Seconds between two looks at whether the API server has all that the operator needs to begin."""

CRD_SECONDS = 300.0
"""Seconds between two looks at whether the CRD of the cluster has all fields of this release."""


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
    requests: PodRequests = field(default_factory=PodRequests)

    def passes(self, absent: Collection[str]) -> PassOptions:
        """Return the options of passes where the API server does not serve these kinds."""
        allowed = replace(self.allowed, gang=names.GANG_KIND not in absent, queue=names.QUEUE_KIND not in absent)
        return PassOptions(
            read_nodes=self.read_nodes,
            network_policies=self.network_policies,
            allowed=allowed,
            requests=self.requests,
            site=site_kinds(self.namespaces),
        )


def registry(options: Options) -> kopf.OperatorRegistry:
    """Return the handlers of one operator."""
    handlers = kopf.OperatorRegistry()
    state = _Handlers(options)
    kopf.on.login(registry=handlers)(kopf.login_via_client)
    kopf.on.startup(registry=handlers, backoff=START_SECONDS)(state.start)
    kopf.on.cleanup(registry=handlers)(state.stop)
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=handlers)(state.job_changed)
    for kind in site_kinds(options.namespaces):
        kopf.on.event(names.GROUP, names.VERSION, names.plural(kind), registry=handlers)(state.site_changed)
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


class _Handlers:
    """Handlers of one operator, and what lives as long as it beside its Program: servers, the Lease, connections."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._instruments = Instruments()
        self._servers: list[HttpServer] = []
        self._tasks: list[asyncio.Task[None]] = []  # none ever ends
        self._program: Program | None = None
        self._missing = "the API server has not answered yet"
        self._leadership: Leadership | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._complaints = Complaints(log)

    async def start(self, **_: Any) -> None:
        options = self._options
        if not self._servers:  # else kopf calls again, after an error
            api = await configure(watches=len(scopes(options.namespaces, _KINDS)))
            if options.lease is not None:
                self._leadership = Leadership(api, *options.lease, options.identity, _end_at_once)
            before_write = self._leadership.check if self._leadership else None
            self._cluster = Cluster(Transport(api, self._instruments, before_write))
            await self._serve()
        # kopf discovers resources once: without the CRD it would watch nothing, forever. Without rights it would end.
        while missing := await find_missing(self._cluster, options.namespaces):
            self._missing = missing
            self._complaints.say(missing, "waiting: %s", missing)
            await asyncio.sleep(START_SECONDS)
        absent = [kind for kind in names.OPTIONAL_KINDS if not await self._cluster.serves(kind)]
        await say_what_is_absent(self._cluster, site_kinds(options.namespaces))
        self._missing = "the pods and other objects of jobs are not read yet"
        self._progress = HttpProgress() if options.ask_progress else None
        self._program = Program(
            self._cluster,
            scopes(options.namespaces, [kind for kind in _KINDS if kind not in absent]),
            lambda: datetime.now(UTC),
            time.monotonic,
            self._progress,
            self._instruments,
            options.passes(absent),
        )
        self._judge = Judge(self._cluster, lambda: datetime.now(UTC), self._program.site_changed)
        self._program.start()
        self._spawn("standstill", show_standstill())
        self._spawn("compare the CRD", self._compare_crd())
        self._beginning = asyncio.create_task(self._begin(self._program), name="begin")

    async def stop(self, **_: Any) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        for task in self._tasks:
            task.cancel()
        if self._program is not None:
            await self._program.close()
        if self._leadership is not None:  # nothing is written any more
            await self._leadership.close()
        await self._cluster.close()
        if self._progress is not None:
            await self._progress.close()
        for server in self._servers:
            await server.close()

    async def _begin(self, program: Program) -> None:
        """Let passes begin once the mirror lacks nothing and, where there is a Lease, this operator holds it."""
        await program.synced()
        self._missing = ""
        gc.freeze()  # programs and the mirror, among which Python will find no garbage
        if self._leadership is not None:
            self._spawn("leader election", self._leadership.run())
            await self._leadership.leading.wait()
        program.begin()
        self._spawn("judge what the site sets", self._judge.run())

    async def _compare_crd(self) -> None:
        """Say whenever the CRD is of an older release, whose fields alone the API server keeps."""
        while True:
            try:
                missing = await lacking_fields(self._cluster) or []
            except Exception as error:  # whatever it is, the next look will do
                self._complaints.say("openapi", "the CRD was not compared with this release: %s", error)
            else:
                self._instruments.crd_missing_fields.set(len(missing))
                if missing:
                    said = "%s; until then no job has them, and what the operator writes there is lost when it ends"
                    self._complaints.say("crd", said, describe_lack(missing))
            await asyncio.sleep(CRD_SECONDS)

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
        if self._program is not None:
            yield from self._program.stuck()

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
        assert self._program is not None
        self._program.take_in(Key(namespace, name, uid), event)

    async def site_changed(self, event: kopf.RawEvent, **_: Any) -> None:
        self._judge.take_in(event)


def _end_at_once() -> None:
    """End the process without an orderly end, which takes time: another operator may act from now on."""
    os._exit(1)
