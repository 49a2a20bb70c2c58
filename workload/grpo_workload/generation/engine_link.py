"""The thread in which a rank talks to its engines and watches over them, whatever its main thread does.

The main thread may be inside a collective that cannot end because a peer has lost an engine. So when an engine is lost, whoever waits
for engines is told at once, and a process that has not ended by itself some seconds later is ended, with the error on record.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from grpo_workload.contract import Engine
from grpo_workload.generation.engine_client import EngineClient, EngineError
from grpo_workload.generation.roster import Sight

logger = logging.getLogger(__name__)
T = TypeVar("T")

LATECOMERS = 1.0  # seconds in which the members of one transfer group fail together


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. An engine's death is known on every rank, or the rank has ended, within `lost` + `look` + an answer's 5 + `grace`: 28."""

    look: float = 2  # between two looks at an engine
    lost: float = 15  # an engine that has not answered well for so long is lost
    grace: float = 6  # for the main thread to end by itself


class EngineLink:
    """Clients of some engines on an event loop of their own."""

    def __init__(self, engines: Sequence[Engine], *, deadline: float, restarts: bool = False, timing: Timing = Timing()) -> None:  # frozen
        """Start the thread; `deadline` in seconds is that of each call. With `restarts`, no lost engine ever ends the process."""
        self._deadline, self._restarts, self.timing = deadline, restarts, timing
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(_open(), self._loop).result()
        self.clients = [EngineClient(engine, self._session, deadline) for engine in engines]
        self._answered: dict[str, float] = {}  # by engine: when it was last well
        self._lost: dict[str, asyncio.Future[EngineError]] = {engine.name: self._loop.create_future() for engine in engines}
        self._watch: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it. EngineError when it raises one, or an engine is lost meanwhile."""
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` there, as `run`, and wait for it later."""
        return asyncio.run_coroutine_threadsafe(_unless(work, self._lost.values()), self._loop)

    def run_freely(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it, whatever engine is lost meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def while_well(self, client: EngineClient, work: Coroutine[Any, Any, T]) -> T:
        """`work`, there; EngineError as soon as this one engine is lost."""
        return await _unless(work, [self._lost[client.engine.name]])

    def look(self) -> Sight:
        """What each engine is now; those that are well are lost no longer. Takes seconds, whatever state they are in."""
        return self.run_freely(self._look())

    def wait_ready(self) -> None:
        """Wait until all engines are healthy, then watch over them. EngineError for one that is not within the deadline."""
        self.run(self._until_all_healthy())

        async def watch() -> None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_all())

        self.run(watch())

    def blame(self, error: Exception) -> Exception:
        """The EngineError of an engine that is not healthy, else `error`: for failures that the loss of an engine may look like."""
        return self.run_freely(first_ill(self.clients)) or error

    def blame_in_time(self, error: Exception) -> Exception:
        """As `blame`, looking until the watch would have noticed: an engine may outlive its workers by seconds."""
        end = time.monotonic() + self.timing.lost
        while (blamed := self.blame(error)) is error and time.monotonic() < end:
            time.sleep(self.timing.look / 4)
        return blamed

    def close(self) -> None:
        """Stop watching, and the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        faulthandler.cancel_dump_traceback_later()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _look(self) -> Sight:
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
        return Sight(processes=found, ill=errors[0].engine, trouble=errors[0].what) if errors else Sight(processes=found)

    async def _process(self, client: EngineClient) -> str:
        try:
            async with asyncio.timeout(self.timing.lost):
                await client.is_healthy()
                name = await client.identify()
        except TimeoutError as error:
            raise EngineError(client.engine, f"did not tell which process it is within {self.timing.lost:g} s") from error
        self._is_well(client)
        return name

    def _is_well(self, client: EngineClient) -> None:
        self._answered[client.engine.name] = time.monotonic()
        if self._lost[client.engine.name].done():
            logger.info("engine %s is back", client.engine.name)
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
                    raise EngineError(client.engine, f"was not ready within {self._deadline:g} s: it {error.what}") from error
            await asyncio.sleep(self.timing.look / 4)

    async def _watch_all(self) -> None:
        looks = [asyncio.ensure_future(self._watch_one(client)) for client in self.clients]
        try:
            await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for look in looks:
                look.cancel()

    async def _watch_one(self, client: EngineClient) -> None:
        """Watch for as long as its loss would not end the process."""
        name = client.engine.name
        self._answered[name] = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.look)
            try:
                await client.is_healthy()
                self._is_well(client)
            except EngineError as error:
                silence = time.monotonic() - self._answered[name]
                if silence > self.timing.lost and not self._lost[name].done():
                    self._lose(EngineError(client.engine, f"has not been well for {silence:.0f} s: it {error.what}"))
                    if not self._restarts:
                        return

    def _lose(self, error: EngineError) -> None:
        logger.error("%s", error)
        if not self._restarts:
            get_error_handler().record_exception(error)
            # Ends the process after the grace, with every thread's stack in the log: also when the interpreter no longer runs.
            faulthandler.dump_traceback_later(self.timing.grace, exit=True)
        self._lost[error.engine.name].set_result(error)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._session.close()


async def _open() -> aiohttp.ClientSession:
    # A connection for every request: vLLM closes idle ones after 5 s, which may cross with a request that must not be repeated.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def _unless(work: Coroutine[Any, Any, T], lost: Iterable[asyncio.Future[EngineError]]) -> T:
    task = asyncio.ensure_future(work)
    losses = list(lost)
    either: set[asyncio.Future[Any]] = {task, *losses}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    raise next(loss.result() for loss in losses if loss.done())


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking `work` on a daemon thread: one that never ends does not keep the process from ending, as a pool's would."""
    result: Future[T] = Future()

    def call() -> None:
        result.set_running_or_notify_cancel()  # from here on, whoever no longer waits leaves the result alone
        try:
            value = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=call, name="transfer", daemon=True).start()
    return await asyncio.wrap_future(result)


async def settle(clients: Sequence[EngineClient], work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results of `work`, in its order, or the error of the engine to blame.

    Where one engine of a transfer group dies, the workers of the others fail with it, and so does the sender: the engine that is no longer
    healthy is to blame, else the first that failed, else whatever failed.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if not pending and not any(task.exception() for task in done):
        return [task.result() for task in tasks]
    if pending:
        late, pending = await asyncio.wait(pending, timeout=LATECOMERS)
        done |= late
    for task in pending:
        task.cancel()
    errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
    failed = [error for error in errors if isinstance(error, EngineError)]
    raise await first_ill(clients) or [*failed, *errors][0]


async def first_ill(clients: Sequence[EngineClient]) -> EngineError | None:
    """What is wrong with the first engine that is not healthy."""
    health = await asyncio.gather(*(client.is_healthy() for client in clients), return_exceptions=True)
    return next((error for error in health if isinstance(error, EngineError)), None)
