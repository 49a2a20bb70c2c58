"""A work queue on asyncio with one task for each key.

It keeps the contract of client-go's rate-limited queue, for one process and thousands of keys: a key has one pass at a
time, a wake that arrives during a pass causes another pass, and a pass that failed is retried after 0.2 s, doubling up
to a minute. Between two passes over a key lies a pause, so that a burst of changes costs few passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from grpo_operator.metrics.instruments import Instruments, Result
from grpo_operator.runtime.complaints import Complaints
from grpo_operator.runtime.errors import ConflictError, EarlyError, expected

K = TypeVar("K", bound=Hashable)
log = logging.getLogger(__name__)

_FIRST_BACKOFF, _LAST_BACKOFF = 0.2, 60.0

EARLY_SECONDS = 2.0
"""Seconds to the next try at most while the API server only needs time."""

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 2.0
"""Pause between two passes over a key. It is as long as the pass before, within these limits: a job with a thousand
pods leaves time for others."""


class WorkQueue(Generic[K]):
    """Runs `work(key)` for every woken key; `work` returns the seconds until its next run, None to wait for a wake.

    Passes begin while `gate` is set. `started` holds when each pass under way began, on the loop's clock.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        instruments: Instruments,
        *,
        gate: asyncio.Event,
        limit: int = 32,
    ) -> None:
        self._work, self._instruments = work, instruments
        self._gate, self._slots = gate, asyncio.Semaphore(limit)
        self._turn = asyncio.Lock()
        self._wakes: dict[K, asyncio.Event] = {}
        self._tasks: dict[K, asyncio.Task[None]] = {}
        self._complaints = Complaints(log)
        self.started: dict[K, float] = {}

    def wake(self, key: K) -> None:
        """Request a pass over a key."""
        self._instruments.noticed(key)
        if key in self._tasks:
            self._wakes[key].set()
        else:
            self._wakes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name=f"reconcile {key}")

    @property
    def keys(self) -> frozenset[K]:
        """Keys with a pass under way or to come."""
        return frozenset(self._tasks)

    async def close(self) -> None:
        """Cancel all passes, those under way at their next await."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: K) -> None:
        loop, wake, backoff = asyncio.get_running_loop(), self._wakes[key], _FIRST_BACKOFF
        while True:
            await self._gate.wait()
            began = loop.time()
            try:
                delay = await self._pass(key)
                backoff = _FIRST_BACKOFF
            except ConflictError:
                delay = random.uniform(0.0, PAUSE_SECONDS)
            except Exception as error:  # a fault of one job, whatever it is, must not stop the others
                self._complain(key, error)
                delay = backoff
                backoff = min(backoff * 2, EARLY_SECONDS if isinstance(error, EarlyError) else _LAST_BACKOFF)
            pause = min(max(PAUSE_SECONDS, loop.time() - began), LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause)
            if delay is None and not wake.is_set():
                del self._tasks[key], self._wakes[key]
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), None if delay is None else max(0.0, delay - pause))

    def _complain(self, key: K, error: Exception) -> None:
        if (known := expected(error)) is None:
            log.error("%s: the pass failed, and is repeated until it works", key, exc_info=error)
        else:  # others may fail for the same cause
            self._complaints.say(
                known.subject, "%s: the pass failed, and is repeated until it works: %s", key, known.text
            )

    async def _pass(self, key: K) -> float | None:
        self._instruments.waiting()
        try:
            # One pass begins in a round of the event loop. Thousands are due at the same moment, and an answer takes
            # some rounds until it is read: a renewal of the Lease did not get through in time.
            async with self._turn:
                await asyncio.sleep(0)
                await self._slots.acquire()
            while not self._gate.is_set():  # closed while the key waited for a slot
                self._slots.release()
                await self._gate.wait()
                await self._slots.acquire()
        except asyncio.CancelledError:
            self._instruments.turn_given_up()
            raise
        self._wakes[key].clear()  # before the pass reads anything: a change during the pass causes another one
        result: Result = "error"
        began = self._instruments.begin_pass(key)
        self.started[key] = asyncio.get_running_loop().time()
        try:
            delay = await self._work(key)
            result = "success" if delay is None else "requeue_after"
        except ConflictError:
            result = "conflict"
            raise
        finally:
            del self.started[key]
            self._slots.release()
            self._instruments.end_pass(key, began, result)
        return delay
