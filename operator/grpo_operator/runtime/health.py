"""/healthz and /readyz of the operator.

kopf's own endpoint cannot serve for this: it answers 200 whatever its probes return or raise.

/healthz fails only where a restart helps: a task that must not end has ended, or a pass does not end. If the event loop
itself stands still, nothing answers. An API server that is away fails no check: each request to it has a deadline.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web

from grpo_operator.runtime.http_server import Handler

Check = Callable[[], Iterable[str]]
"""Returns what is wrong, one line each; nothing if all is well."""

PASS_SECONDS = 600.0
"""Seconds after which a pass counts as stuck. Its first request that has no answer within seconds ends it."""

LOOP_SECONDS = 30.0
"""Seconds of a standstill of the event loop until the log shows where it stands; the kubelet waits longer."""


def health_page(check: Check) -> Handler:
    """Return a page that answers 200, or 503 with what is wrong."""

    async def answer(_: web.Request) -> web.Response:
        wrong = list(check())
        return web.Response(text="\n".join(wrong or ["ok"]) + "\n", status=503 if wrong else 200)

    return answer


def ended_tasks(tasks: Iterable[asyncio.Task[None]]) -> Iterator[str]:
    """Yield the tasks that have ended, of tasks that never should."""
    for task in tasks:
        if task.done():
            yield f"the task {task.get_name()!r} has ended: {_end_of(task)}"


def _end_of(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "it was cancelled"
    error = task.exception()
    return "it returned" if error is None else f"{type(error).__name__}: {error}"


def stuck_passes(began: Mapping[Any, float], now: float) -> Iterator[str]:
    """Yield the passes that do not end. `began`: when each pass that runs now began, by the clock of `now`."""
    for key, since in began.items():
        if now - since > PASS_SECONDS:
            yield f"the pass over {key} has not ended for {now - since:.0f} s"


async def show_standstill() -> None:
    """Write the stack of the event loop to stderr whenever it stands still for `LOOP_SECONDS`; never return."""
    while True:
        faulthandler.dump_traceback_later(LOOP_SECONDS)
        await asyncio.sleep(LOOP_SECONDS / 3)
