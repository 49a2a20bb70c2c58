"""A thread with an event loop: requests of a rank that go on while it does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on an event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` has ended it."""
        return self._loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` in the thread; the future has its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread, and wait for it."""
        return self.submit(work).result()

    async def hand_over(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread, and wait for it in another event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self, last: Callable[[], Awaitable[object]] | None = None) -> None:
        """Cancel all work, await `last` in the thread, and end it; a second call does nothing."""
        if self.is_closed:
            return
        self.run(self._end(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Callable[[], Awaitable[object]] | None) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        if last is not None:
            await last()
