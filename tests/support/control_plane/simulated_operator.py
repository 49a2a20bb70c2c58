"""The operator without HTTP: its own parts over an API server in memory, in virtual time.

A test suspends it between any two requests of a pass, lets requests fail before or after they took effect, and disturbs
its watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api import names
from grpo_operator.layout.admission import Allowed
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.metrics.jobs import WatchedJob
from grpo_operator.passes.launchers import Launchers
from grpo_operator.passes.reconcile import Reconciler
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.deleted_pods import DeletedPods
from grpo_operator.runtime.mirror import Key, Mirror
from grpo_operator.runtime.scopes import scopes
from grpo_operator.runtime.watches import Watches
from grpo_operator.runtime.workqueue import WorkQueue
from support.control_plane.memory_api import MemoryApi, Request
from support.control_plane.memory_store import Object, Selection
from support.control_plane.simulated_cluster import SimulatedCluster


@dataclass
class Pass:
    """The requests of a pass that reached the API server, and the version of the job that it read or wrote last."""

    requests: list[Request] = field(default_factory=list)
    known: str | None = None


_PASS: ContextVar[Pass | None] = ContextVar("_PASS", default=None)


class PassApi(MemoryApi):
    """An API server for one operator. While `held`, requests of passes wait, before and after their effect.

    `check` is called when a request of a pass reaches the server.
    """

    def __init__(self, cluster: SimulatedCluster, check: Callable[[Request, Pass], None]) -> None:
        super().__init__(cluster.store)
        self._check = check
        self.held = False
        self.waiting: list[tuple[Request, asyncio.Future[None]]] = []
        self.failures: list[Exception] = []
        self.passes: list[Pass] = []

    async def before(self, request: Request) -> None:
        if (current := _PASS.get()) is None:  # of the watches
            return
        await self._turn(request)
        if self.failures:
            raise self.failures.pop()
        self._check(request, current)
        current.requests.append(request)

    async def after(self, request: Request) -> None:
        if (current := _PASS.get()) is None:
            return
        if request.kind == names.KIND:
            job = self.store.get(names.KIND, request.namespace or "", request.name)
            current.known = job["metadata"]["resourceVersion"] if job else None
        await self._turn(request)

    async def _turn(self, request: Request) -> None:
        if self.held:
            turn = request, asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            try:
                await turn[1]
            finally:
                if turn in self.waiting:
                    self.waiting.remove(turn)

    def count(self) -> int:
        """Return the number of requests that passes have made."""
        return sum(len(one.requests) for one in self.passes)

    def proceed(self, which: int, error: Exception | None = None) -> None:
        """Let a request that waits proceed, or fail: before it reaches the server, or before its answer comes."""
        if self.waiting:
            _, turn = self.waiting.pop(which % len(self.waiting))
            if error is None:
                turn.set_result(None)
            else:
                turn.set_exception(error)

    def release(self) -> None:
        """Hold no request any more."""
        self.held = False
        while self.waiting:
            self.proceed(0)


class SimulatedOperator:
    """One operator. Call `start` in the loop that it lives in."""

    def __init__(self, cluster: SimulatedCluster, check: Callable[[Request, Pass], None]) -> None:
        self.cluster, self.api = cluster, PassApi(cluster, check)

    async def start(self) -> None:
        """Begin to watch and to reconcile, as a process that has just started."""
        self.instruments, loop = Instruments(), asyncio.get_running_loop()
        client: Any = Cluster(self.api)  # type: ignore[arg-type]
        self.deleted_pods: DeletedPods[Key] = DeletedPods(loop.time)
        self.mirror = Mirror(scopes(()), self._wake, self.deleted_pods.remember, self._job_seen, self.instruments.gone)
        self.watches = Watches(client, self.mirror, self.instruments)
        self.launchers = Launchers(None, self._wake, self.instruments)
        self.reconciler = Reconciler(
            client,
            self.mirror,
            self.launchers,
            self.deleted_pods,
            self.cluster.now,
            self.instruments,
            allowed=Allowed(),
        )
        self.queue: WorkQueue[Key] = WorkQueue(self._work, self.instruments, gate=self.mirror.synced)
        self.watches.start()
        self._jobs = asyncio.create_task(self._follow_jobs())

    async def stop(self) -> None:
        """End at once, wherever a pass is."""
        self._jobs.cancel()
        await asyncio.gather(self._jobs, return_exceptions=True)
        await self.watches.close()
        await self.queue.close()
        await self.launchers.close()
        self.api.release()

    async def _work(self, key: Key) -> float | None:
        self.api.passes.append(Pass())
        _PASS.set(self.api.passes[-1])
        try:
            return await self.reconciler.reconcile(key)
        finally:
            _PASS.set(None)

    def _wake(self, key: Key) -> None:
        self.queue.wake(key)

    def _job_seen(self, key: Key, raw: Object) -> None:
        self.instruments.jobs.seen(key, WatchedJob.read(key.namespace, key.name, raw.get("status", {})))

    async def _follow_jobs(self) -> None:
        """Watch jobs as kopf does, which does not tell of jobs that were deleted while its watch was interrupted."""
        path = names.PATHS[names.KIND].replace("/namespaces/{}", "")
        while True:
            for raw in self.cluster.store.select(Selection(names.KIND)):
                self._job_event("ADDED", raw)
            query = [("labelSelector", ""), ("resourceVersion", str(self.cluster.store.version))]
            try:
                async for event in self.api.stream(path, query):
                    if event["type"] == "ERROR":
                        break
                    self._job_event(event["type"], event["object"])
            except Exception:  # whatever it is, kopf lists again
                pass
            await asyncio.sleep(0.1)

    def _job_event(self, event: str, raw: Object) -> None:
        key = Key(raw["metadata"]["namespace"], raw["metadata"]["name"], raw["metadata"]["uid"])
        if event == "DELETED":
            self.mirror.drop_job(key)
        elif not self.mirror.keep_job(raw):
            return
        self._wake(key)
