"""Ways to wait for calls to several engines, any of which may fail or be lost meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_workload.generation.servers.errors import AbsentError, EngineError
from grpo_workload.generation.servers.http_client import EngineClient

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


async def until_all_healthy(
    clients: Sequence[EngineClient], *, limit: float, poll: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait until all engines are ready, asking every `poll` seconds.

    EngineError names one that is not, once `limit` seconds have passed since another became healthy: nodes may become
    free one after another.
    """
    newest = clock()

    async def until_healthy(client: EngineClient) -> None:
        nonlocal newest
        while True:
            try:
                await client.is_ready()
            except EngineError as error:
                if clock() > newest + limit:
                    what = f"was not ready within {limit:g} s: it {error.what}"
                    raise EngineError(client.engine, what) from error
            else:
                newest = clock()
                return
            await asyncio.sleep(poll)

    await asyncio.gather(*(until_healthy(client) for client in clients))


async def those_that_come(clients: Sequence[EngineClient], *, limit: float, poll: float) -> list[EngineClient]:
    """Wait until each engine is ready, its host has no address, or `limit` seconds have passed.

    Returns those that are ready.
    """

    async def comes(client: EngineClient) -> bool:
        while True:
            try:
                await client.is_ready()
            except AbsentError:
                return False
            except EngineError:
                await asyncio.sleep(poll)
            else:
                return True

    async def comes_in_time(client: EngineClient) -> bool:
        try:
            async with asyncio.timeout(limit):
                return await comes(client)
        except TimeoutError:
            return False

    came = await asyncio.gather(*map(comes_in_time, clients))
    return [client for client, is_there in zip(clients, came, strict=True) if is_there]


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
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if not pending and not any(task.exception() for task in done):
            return [task.result() for task in tasks]
        if pending:
            late, _ = await asyncio.wait(pending, timeout=LATECOMERS)
            done |= late
    finally:  # also when the caller gives up: a late call could reach the engine's next process
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
    failed = [error for error in errors if isinstance(error, EngineError)]
    raise await first_unhealthy(clients) or [*failed, *errors][0]


async def first_unhealthy(clients: Sequence[EngineClient]) -> EngineError | None:
    """Return the error of the first engine that is not healthy; None if all are."""
    health = await asyncio.gather(*(client.is_healthy() for client in clients), return_exceptions=True)
    return next((error for error in health if isinstance(error, EngineError)), None)
