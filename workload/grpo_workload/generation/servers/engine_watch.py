"""The thread in which a rank talks to its engines and watches their health, whatever its main thread does.

The main thread may be stuck in a collective because a peer has lost an engine. So when an engine is lost, calls that
wait for engines fail at once. A process that has not ended by itself some seconds later is killed, after its error was
recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from grpo_workload.generation.servers.http_client import EngineClient, EngineError
from grpo_workload.generation.servers.roster import Observation
from grpo_workload.generation.servers.token_watch import TokenWatch
from grpo_workload.generation.servers.waiting import first_unhealthy, unless_lost
from grpo_workload.spec.contract import Engine

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StuckError(EngineError):
    """The engine answers, but gets no further with its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of the watch, in seconds.

    `lost` + `poll` + 5 for an answer + `grace` = 28 s after an engine's death, every rank knows of it or has ended; and
    as long, with `stuck` in place of `lost`, after an engine that answers has sampled its last token.
    """

    poll: float = 2  # seconds between two health checks of an engine
    lost: float = 15  # seconds without a healthy answer after which an engine counts as lost
    stuck: float = 15  # seconds without progress after which an engine with requests counts as lost
    quiet: float = 5  # seconds without a completion before an engine is asked whether it makes progress
    grace: float = 6  # seconds for the main thread to end by itself


class EngineLink:
    """Clients of a rank's engines, on an event loop in their own thread."""

    def __init__(
        self, engines: Sequence[Engine], *, deadline: float, restarts: bool = False, timing: Timing = Timing()
    ) -> None:
        """Start the thread. Each call has `deadline` seconds. With `restarts`, a lost engine never ends the process."""
        self._deadline, self._restarts, self.timing = deadline, restarts, timing
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(_open(), self._loop).result()
        self.clients = [EngineClient(engine, self._session, deadline) for engine in engines]
        self._answered: dict[str, float] = {}  # by engine: time of its last healthy answer
        self._lost: dict[str, asyncio.Future[EngineError]] = {
            engine.name: self._loop.create_future() for engine in engines
        }
        self._tokens = {
            engine.name: TokenWatch(
                limit=timing.stuck, first_limit=deadline, quiet=timing.quiet, copies=engine.data_parallel
            )
            for engine in engines
        }
        self.on_moved: Callable[[], None] = lambda: None  # called in the thread when an engine has made progress
        self._watch: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread and wait for it. EngineError when it raises one, or an engine is lost meanwhile."""
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` in the thread; the future behaves as `run` does."""
        return asyncio.run_coroutine_threadsafe(unless_lost(work, self._lost.values()), self._loop)

    def run_freely(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread and wait for it, even if an engine is lost meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def unless_lost(self, client: EngineClient, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; EngineError as soon as this one engine is lost. Called in the thread."""
        return await unless_lost(work, [self._lost[client.engine.name]])

    async def sample(self, client: EngineClient, process: str, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, a request to a process of the engine for completions. Called in the thread.

        EngineError as soon as the engine is lost; one that samples no token counts as lost, too.
        """
        tokens, answered = self._tokens[client.engine.name], False
        tokens.sent(process, time.monotonic())
        try:
            result = await self.unless_lost(client, work)
            answered = True
        finally:
            tokens.ended(answered=answered, now=time.monotonic())
        self.on_moved()
        return result

    def observe(self) -> Observation:
        """Ask every engine for its health and process; a healthy one no longer counts as lost. Ends within seconds."""
        return self.run_freely(self._observe())

    def wait_ready(self) -> None:
        """Wait until all engines are healthy, then watch them. EngineError names one that misses the deadline."""
        self.run(self._until_all_healthy())

        async def watch() -> None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_all())

        self.run(watch())

    def blame(self, error: Exception) -> Exception:
        """Return the EngineError of an unhealthy engine, else `error`, which the loss of an engine may have caused."""
        return self.run_freely(first_unhealthy(self.clients)) or error

    def blame_in_time(self, error: Exception) -> Exception:
        """Repeat `blame` until the watch would have noticed a loss: an engine may outlive its workers by seconds."""
        end = time.monotonic() + self.timing.lost
        while (blamed := self.blame(error)) is error and time.monotonic() < end:
            time.sleep(self.timing.poll / 4)
        return blamed

    def close(self) -> None:
        """Stop the watch and the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        faulthandler.cancel_dump_traceback_later()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _observe(self) -> Observation:
        processes = await asyncio.gather(*(self._process(client) for client in self.clients), return_exceptions=True)
        found: dict[str, str] = {}
        errors: list[EngineError] = []
        for client, one in zip(self.clients, processes, strict=True):
            if isinstance(one, EngineError):
                errors.append(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                found[client.engine.name] = one
        if errors:
            return Observation(processes=found, unhealthy=errors[0].engine, trouble=errors[0].what)
        return Observation(processes=found)

    async def _process(self, client: EngineClient) -> str:
        try:
            async with asyncio.timeout(self.timing.lost):
                await self._check(client)
                name = await client.identify()
        except TimeoutError as error:
            raise EngineError(
                client.engine, f"did not answer with its process's name within {self.timing.lost:g} s"
            ) from error
        self._note_healthy(client)
        return name

    async def _check(self, client: EngineClient) -> None:
        """Raise EngineError unless the engine is healthy; StuckError if it gets no further with its requests."""
        await client.is_healthy()
        tokens = self._tokens[client.engine.name]
        if not tokens.needs_look(time.monotonic()):
            return
        if tokens.see(await client.metrics(), time.monotonic()):
            self.on_moved()
        if tokens.is_stuck:
            raise StuckError(client.engine, f"hangs: it has sampled no token for {tokens.allowed:g} s")

    def _note_healthy(self, client: EngineClient) -> None:
        self._answered[client.engine.name] = time.monotonic()
        if self._lost[client.engine.name].done():
            logger.info("engine %s is healthy again", client.engine.name)
            self._lost[client.engine.name] = self._loop.create_future()

    async def _until_all_healthy(self) -> None:
        await asyncio.gather(*(self._until_healthy(client) for client in self.clients))

    async def _until_healthy(self, client: EngineClient) -> None:
        end = time.monotonic() + self._deadline
        while True:
            try:
                return await client.is_healthy()
            except EngineError as error:
                if time.monotonic() > end:
                    raise EngineError(
                        client.engine, f"was not ready within {self._deadline:g} s: it {error.what}"
                    ) from error
            await asyncio.sleep(self.timing.poll / 4)

    async def _watch_all(self) -> None:
        watches = [asyncio.ensure_future(self._watch_one(client)) for client in self.clients]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()

    async def _watch_one(self, client: EngineClient) -> None:
        """Check an engine's health again and again; return after a loss that ends the process."""
        name = client.engine.name
        self._answered[name] = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.poll)
            try:
                await self._check(client)
                self._note_healthy(client)
            except EngineError as error:
                silence = time.monotonic() - self._answered[name]
                if self._lost[name].done():
                    continue
                if isinstance(error, StuckError):
                    self._lose(error)
                elif silence > self.timing.lost:
                    self._lose(EngineError(client.engine, f"has not been healthy for {silence:.0f} s: it {error.what}"))
                if self._lost[name].done() and not self._restarts:
                    return

    def _lose(self, error: EngineError) -> None:
        logger.error("%s", error)
        if not self._restarts:
            get_error_handler().record_exception(error)
            # Ends the process after the grace with every thread's stack in the log, even if the interpreter is stuck.
            faulthandler.dump_traceback_later(self.timing.grace, exit=True)
        self._lost[error.engine.name].set_result(error)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._session.close()


async def _open() -> aiohttp.ClientSession:
    # Each request gets a new connection: vLLM closes idle ones after 5 s, perhaps just as a request that must not be
    # repeated is sent.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
