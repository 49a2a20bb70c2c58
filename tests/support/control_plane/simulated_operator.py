"""The operator without HTTP: its own parts over an API server in memory, in virtual time.

A test suspends it between any two requests of a pass, lets requests fail before or after they took effect, and disturbs
its watches.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api import names
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.reconcile import PassOptions
from grpo_operator.program import Program
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.scopes import scopes
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


class _Program(Program):
    """Notes to which pass a request belongs."""

    def __init__(self, cluster: SimulatedCluster, api: PassApi) -> None:
        time = asyncio.get_running_loop().time
        client: Any = Cluster(api)  # type: ignore[arg-type]
        super().__init__(client, scopes(()), cluster.now, time, None, Instruments(), PassOptions())
        self._api = api

    async def reconcile(self, key: Key) -> float | None:
        self._api.passes.append(Pass())
        _PASS.set(self._api.passes[-1])
        try:
            return await super().reconcile(key)
        finally:
            _PASS.set(None)


class SimulatedOperator:
    """One operator. Call `start` in the loop that it lives in."""

    def __init__(self, cluster: SimulatedCluster, check: Callable[[Request, Pass], None]) -> None:
        self.cluster, self.api = cluster, PassApi(cluster, check)

    async def start(self) -> None:
        """Begin to watch and to reconcile, as a process that has just started."""
        self.program = _Program(self.cluster, self.api)
        self.program.start()
        self._tasks = [asyncio.create_task(self._begin()), asyncio.create_task(self._follow_jobs())]

    async def stop(self) -> None:
        """End at once, wherever a pass is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.program.close()
        self.api.release()

    async def _begin(self) -> None:
        await self.program.synced()
        self.program.begin()

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
        self.program.take_in(key, {"type": event, "object": raw})
