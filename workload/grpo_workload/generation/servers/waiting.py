"""Ways to wait for calls to several engines, any of which may fail or be lost meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_workload.generation.servers.http_client import EngineClient, EngineError

T = TypeVar("T")

LATECOMERS = 1.0  # seconds within which the members of one transfer group fail together


async def unless_lost(work: Coroutine[Any, Any, T], lost: Iterable[asyncio.Future[EngineError]]) -> T:
    """Await `work`; as soon as one of `lost` is done, cancel it and raise that error."""
    task = asyncio.ensure_future(work)
    losses = list(lost)
    either: set[asyncio.Future[Any]] = {task, *losses}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    raise next(loss.result() for loss in losses if loss.done())


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking `work` on a daemon thread, which cannot keep the process from ending, as a pool's thread would."""
    result: Future[T] = Future()

    def call() -> None:
        result.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so setting its result works
        try:
            value = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=call, name="transfer", daemon=True).start()
    return await asyncio.wrap_future(result)


async def settle(clients: Sequence[EngineClient], work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return all results of `work`, in its order, or raise the root cause of its failures.

    When one engine of a transfer group dies, the other engines' workers and the sender fail with it. The root cause is
    an engine that is no longer healthy, else the first EngineError, else the first error.
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
    raise await first_unhealthy(clients) or [*failed, *errors][0]


async def first_unhealthy(clients: Sequence[EngineClient]) -> EngineError | None:
    """Return the error of the first engine that is not healthy; None if all are."""
    health = await asyncio.gather(*(client.is_healthy() for client in clients), return_exceptions=True)
    return next((error for error in health if isinstance(error, EngineError)), None)
