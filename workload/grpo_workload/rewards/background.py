"""Requests that go on while the rank does something else: a thread with an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")

CLOSING_SECONDS = 5.0
"""Most seconds that closing waits for requests to end."""


class Background:
    """Runs coroutines in a thread of its own, inside one context: what all of them share, such as connections."""

    def __init__(self, shared: Callable[[], AbstractAsyncContextManager[object]], *, name: str) -> None:
        """Start the thread; `shared` is entered there before any coroutine runs."""
        self._loop, self._open = asyncio.new_event_loop(), threading.Event()
        self._end, self._ended = asyncio.Event(), False
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(shared),), daemon=True)
        self._thread.name = name
        self._thread.start()
        self._open.wait()

    async def _run(self, shared: Callable[[], AbstractAsyncContextManager[object]]) -> None:
        try:
            async with shared():
                self._open.set()
                await self._end.wait()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        finally:
            self._ended = True
            self._open.set()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin some work; the future has its result. Raises RuntimeError if the thread has ended."""
        if self._ended:
            work.close()
            raise RuntimeError(f"the thread of {self._thread.name} has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End all work, and the thread."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(CLOSING_SECONDS)
