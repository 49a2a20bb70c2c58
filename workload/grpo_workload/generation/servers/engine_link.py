"""The thread in which a rank talks to its engines, and watches them."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.engine_watch import EngineWatch, Timing
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.roster import Observation
from grpo_workload.generation.servers.waiting import first_unhealthy
from grpo_workload.ranks.loop_thread import LoopThread

T = TypeVar("T")


class EngineLink:
    """Clients of a rank's engines, on an event loop in their own thread."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        deadline: float,
        attempt: int = 0,
        restarts: bool = False,
        timing: Timing = Timing(),
    ) -> None:
        """Start the thread. Each call has `deadline` seconds. With `restarts`, a lost engine never ends the process.

        `attempt`: the job's; engines of earlier ones count as not ready until their pods let them go on.
        """
        self.timing = timing
        self.patience_to_join = min(timing.join, deadline)
        """Seconds that ranks wait for an elastic engine to join a transfer group, to answer a call, or to receive."""
        self._thread = LoopThread("engines")

        async def begin() -> tuple[aiohttp.ClientSession, list[EngineClient], EngineWatch]:
            # Each request gets a new connection: vLLM closes idle ones after 5 s, perhaps just as a request that must
            # not be repeated is sent.
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
            clients = [
                EngineClient(engine, session, self.patience_to_join if engine.elastic else deadline, attempt)
                for engine in engines
            ]
            return session, clients, EngineWatch(clients, deadline=deadline, restarts=restarts, timing=timing)

        self._session, self.clients, self.watch = self.run_freely(begin())
        self.elastic = frozenset(engine.name for engine in engines if engine.elastic)
        self._used: Collection[str] = {engine.name for engine in engines} - self.elastic

    def use(self, names: Collection[str]) -> None:
        """Let the loss of these engines end what `run` and `begin` wait for: at first, of all that are not elastic."""
        self._used = names

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread and wait for it. EngineError when it raises one, or a used engine is lost."""
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` in the thread; the future behaves as `run` does."""
        return self._thread.submit(self.watch.unless_lost(self._used, work))

    def run_freely(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread and wait for it, even if an engine is lost meanwhile."""
        return self._thread.run(work)

    def wait_ready(self) -> None:
        """See `EngineWatch.start`."""
        self.run(self.watch.start())

    def observe(self) -> Observation:
        """See `EngineWatch.observe`."""
        return self.run_freely(self.watch.observe())

    def blame(self, error: Exception) -> Exception:
        """Return the EngineError of an unhealthy engine, else `error`, which the loss of an engine may have caused."""
        used = [client for client in self.clients if client.engine.name in self._used]
        return self.run_freely(first_unhealthy(used)) or error

    def blame_in_time(self, error: Exception) -> Exception:
        """Repeat `blame` until the watch would have noticed a loss: an engine may outlive its workers by seconds."""
        end = time.monotonic() + self.timing.lost
        while (blamed := self.blame(error)) is error and time.monotonic() < end:
            time.sleep(self.timing.poll / 4)
        return blamed

    def close(self) -> None:
        """Stop the watch and the thread; a second call does nothing."""
        if self._thread.is_closed:
            return
        faulthandler.cancel_dump_traceback_later()
        # It cancels the watch, and requests that were begun ahead; vLLM aborts these when their connections close.
        self._thread.close(self._session.close)
