"""A work queue on asyncio with one task for each key.

It keeps the contract of client-go's rate-limited queue, for one process and thousands of keys: a key has one pass at a
time, a wake that arrives during a pass causes another pass, and a pass that failed is retried after 0.2 s, doubling up
to a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from grpo_operator.edge.errors import ConflictError
from grpo_operator.metrics.instruments import Instruments, Result

K = TypeVar("K", bound=Hashable)
log = logging.getLogger(__name__)

_FIRST_BACKOFF, _LAST_BACKOFF = 0.2, 60.0


class WorkQueue(Generic[K]):
    """Runs `work(key)` for every woken key; `work` returns the seconds until its next run, None to wait for a wake."""

    def __init__(
        self, work: Callable[[K], Awaitable[float | None]], instruments: Instruments, *, limit: int = 32
    ) -> None:
        self._work, self._instruments = work, instruments
        self._slots = asyncio.Semaphore(limit)
        self._wakes: dict[K, asyncio.Event] = {}
        self._tasks: dict[K, asyncio.Task[None]] = {}
        self.last_pass = asyncio.get_running_loop().time()

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
        wake, backoff = self._wakes[key], _FIRST_BACKOFF
        while True:
            wake.clear()  # before the pass reads anything: a change during the pass causes another one
            try:
                delay = await self._pass(key)
                backoff = _FIRST_BACKOFF
            except ConflictError:
                delay = 0.0
            except Exception:  # a fault of one job, whatever it is, must not stop the others
                log.exception("%s: the pass failed; retrying in %.1f s", key, backoff)
                delay, backoff = backoff, min(backoff * 2, _LAST_BACKOFF)
            self.last_pass = asyncio.get_running_loop().time()
            if delay is None and not wake.is_set():
                del self._tasks[key], self._wakes[key]
                return
            try:
                await asyncio.wait_for(wake.wait(), delay)
            except TimeoutError:
                continue

    async def _pass(self, key: K) -> float | None:
        self._instruments.waiting()
        try:
            await self._slots.acquire()
        except asyncio.CancelledError:
            self._instruments.turn_given_up()
            raise
        result: Result = "error"
        began = self._instruments.begin_pass(key)
        try:
            delay = await self._work(key)
            result = "success" if delay is None else "requeue_after"
        except ConflictError:
            result = "conflict"
            raise
        finally:
            self._slots.release()
            self._instruments.end_pass(key, began, result)
        return delay
