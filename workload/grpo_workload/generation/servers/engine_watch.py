"""Watches the health of a rank's engines, on the event loop that talks to them, whatever the main thread does.

The main thread may be stuck in a collective because a peer has lost an engine. So when an engine is lost, calls that
wait for engines fail at once. A process that has not ended by itself some seconds later is killed, after its error was
recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from grpo_workload.generation.servers.errors import EngineError, NoAnswerError, StuckError
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.roster import Observation
from grpo_workload.generation.servers.token_watch import TokenWatch
from grpo_workload.generation.servers.waiting import those_that_come, unless_lost, until_all_healthy

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
    late: float = 60  # seconds to wait at the start for elastic engines whose pods exist, once all others are healthy
    away: float = 10  # seconds between two looks whether an elastic engine is there
    join: float = 30  # seconds that ranks wait for an elastic engine to join a group, answer a call, or receive
    again: float = 60  # seconds until one that could not take part in a push is tried again; it doubles each time


class EngineWatch:
    """A rank's knowledge of its engines. All but `paused` and `left_out` is for one event loop, on which it is made."""

    def __init__(self, clients: Sequence[EngineClient], *, deadline: float, restarts: bool, timing: Timing) -> None:
        """See `EngineLink`; `clients` is one for each engine."""
        self._clients, self._deadline, self._restarts, self._timing = clients, deadline, restarts, timing
        self._answered: dict[str, float] = {}  # by engine: time of its last healthy answer
        self._lost: dict[str, asyncio.Future[EngineError]] = {}
        for client in clients:
            lost = self._lost[client.engine.name] = asyncio.get_running_loop().create_future()
            if client.engine.elastic:
                lost.set_result(EngineError(client.engine, "is not there yet"))
        self._unusable: dict[str, EngineError] = {}  # elastic engines that are healthy, but name no process
        self._tokens = {
            client.engine.name: TokenWatch(
                limit=timing.stuck, first_limit=deadline, quiet=timing.quiet, copies=client.engine.data_parallel
            )
            for client in clients
        }
        self.on_moved: Callable[[], None] = lambda: None  # called when an engine has made progress
        self._watching: asyncio.Task[None] | None = None
        self._is_paused = False

    async def unless_lost(self, names: Collection[str], work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; EngineError as soon as one of these engines is lost."""
        return await unless_lost(work, [self._lost[name] for name in names])

    async def sample(self, client: EngineClient, process: str, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, a request to a process of the engine for completions.

        EngineError as soon as the engine is lost; one that samples no token counts as lost, too.
        """
        tokens, answered = self._tokens[client.engine.name], False
        tokens.sent(process, time.monotonic())
        try:
            result = await self.unless_lost([client.engine.name], work)
            answered = True
        finally:
            tokens.ended(answered=answered, now=time.monotonic())
        self.on_moved()
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the check of progress while engines receive weights."""
        self._is_paused = True
        try:
            yield
        finally:
            now = time.monotonic()
            for tokens in self._tokens.values():
                tokens.rested(now)
            self._is_paused = False

    async def start(self) -> None:
        """Wait until all engines are healthy, then watch them. EngineError names one that misses the deadline.

        Of the elastic ones, wait a while for those whose pods exist.
        """
        needed = [client for client in self._clients if not client.engine.elastic]
        others = [client for client in self._clients if client.engine.elastic]
        poll = self._timing.poll / 4
        await until_all_healthy(needed, limit=self._deadline, poll=poll)
        for client in await those_that_come(others, limit=self._timing.late, poll=poll):
            self._note_healthy(client)
        self._watching = asyncio.get_running_loop().create_task(self._watch_all())

    async def observe(self) -> Observation:
        """Ask every engine for its health and process, of the elastic ones those that the watch has seen.

        A healthy one no longer counts as lost. Ends within seconds.
        """
        asked = [client for client in self._clients if not self._is_away(client)]
        processes = await asyncio.gather(*(self._process(client) for client in asked), return_exceptions=True)
        found: dict[str, str] = {}
        errors: list[EngineError] = []
        for client, one in zip(asked, processes, strict=True):
            if isinstance(one, EngineError):
                if not client.engine.elastic:
                    errors.append(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                found[client.engine.name] = one
        if errors:
            return Observation(processes=found, unhealthy=errors[0].engine, trouble=errors[0].what)
        return Observation(processes=found)

    async def _process(self, client: EngineClient) -> str:
        """Return the name of the engine's process; EngineError if it is not healthy, or names none.

        An elastic engine that names none counts as lost: the watch asks it again, and no push waits for it.
        """
        name = client.engine.name
        try:
            await self._check(client)
        except EngineError:
            self._unusable.pop(name, None)
            raise
        try:
            async with asyncio.timeout(self._timing.lost):
                process = await client.identify()
        except TimeoutError:
            what = f"did not answer with its process's name within {self._timing.lost:g} s"
        except NoAnswerError:
            raise
        except EngineError as error:
            what = error.what
        else:
            self._unusable.pop(name, None)
            self._note_healthy(client)
            return process
        failure = EngineError(client.engine, f"is healthy, but cannot be used: it {what}")
        if client.engine.elastic:
            self._unusable[name] = failure
            if not self._lost[name].done():
                self._lose(failure)
        raise failure

    def left_out(self) -> list[str]:
        """Return why each elastic engine is left out that is healthy, but names no process that could be used."""
        failures = list(self._unusable.values())
        return [f"{error}; until that changes, it gets no weights and no prompts" for error in failures]

    def _is_away(self, client: EngineClient) -> bool:
        return client.engine.elastic and self._lost[client.engine.name].done()

    async def _check(self, client: EngineClient) -> None:
        """Raise EngineError unless the engine is healthy; StuckError if it gets no further with its requests."""
        await client.is_healthy()
        tokens = self._tokens[client.engine.name]
        if self._is_paused or not tokens.needs_look(time.monotonic()):
            return
        if tokens.see(await client.metrics(), time.monotonic()):
            self.on_moved()
        if tokens.is_stuck:
            raise StuckError(client.engine, f"hangs: it has sampled no token for {tokens.allowed:g} s")

    def _note_healthy(self, client: EngineClient) -> None:
        self._answered[client.engine.name] = time.monotonic()
        if self._lost[client.engine.name].done():
            logger.info("engine %s is there", client.engine.name)
            self._lost[client.engine.name] = asyncio.get_running_loop().create_future()

    async def _watch_all(self) -> None:
        watches = [asyncio.ensure_future(self._watch_one(client)) for client in self._clients]
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
            await asyncio.sleep(self._timing.away if self._is_away(client) else self._timing.poll)
            try:
                if self._is_away(client):
                    await self._process(client)
                    continue
                await self._check(client)
                if not self._is_away(client):  # `observe` may have lost it meanwhile
                    self._note_healthy(client)
            except EngineError as error:
                silence = time.monotonic() - self._answered[name]
                if self._lost[name].done():
                    continue
                if isinstance(error, StuckError):
                    self._lose(error)
                elif silence > self._timing.lost:
                    self._lose(EngineError(client.engine, f"has not been healthy for {silence:.0f} s: it {error.what}"))
                if self._lost[name].done() and not self._restarts:
                    return

    def _lose(self, error: EngineError) -> None:
        logger.log(logging.WARNING if error.engine.elastic else logging.ERROR, "%s", error)
        if not self._restarts:
            get_error_handler().record_exception(error)
            # Ends the process after the grace with every thread's stack in the log, even if the interpreter is stuck.
            faulthandler.dump_traceback_later(self._timing.grace, exit=True)
        self._lost[error.engine.name].set_result(error)
