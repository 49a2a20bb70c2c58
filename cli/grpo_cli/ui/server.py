"""The page's server on loopback: files of this package and JSON answers, GET only."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from aiohttp import web

from grpo_cli.ui.others import Others, further_folders
from grpo_cli.ui.plans import Plans
from grpo_cli.ui.source import Source, SourceError
from grpo_spec.gpus import MEMORY

HOST = "127.0.0.1"
SECONDS_BETWEEN = 1.0
"""Time between two requests to a source, however many browsers are open."""
ASSETS = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/curves.js": ("curves.js", "text/javascript"),
    "/compare.js": ("compare.js", "text/javascript"),
    "/panels.js": ("panels.js", "text/javascript"),
    "/memory.js": ("memory.js", "text/javascript"),
    "/dom.js": ("dom.js", "text/javascript"),
}
HEADERS = {
    # A model writes completions: whatever they contain, the browser runs and loads only the files above.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Page:
    """A source as browsers get it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = asyncio.Lock()
        self._asked = self._answered = float("-inf")
        self._error = ""

    async def state(self, generation: int, after: int) -> dict[str, Any]:
        """Return what a browser with the steps up to `after` of `generation` lacks.

        After an error the known rows stay, with their age in seconds.
        """
        async with self._lock:
            if time.monotonic() - self._asked > SECONDS_BETWEEN:
                await self._refresh()
            shown = self._source.shown
            return {
                "title": shown.title,
                "where": shown.where,
                "note": shown.note,
                "error": self._error,
                "age": None if self._answered == float("-inf") else round(time.monotonic() - self._answered, 1),
                "idle": None if shown.changed is None else round(time.time() - shown.changed, 1),
                "job": shown.job,
                # Their texts are at /api/logs: a page asks for them when one is another than it has.
                "logs": {pod: zlib.crc32(text.encode()) for pod, text in shown.logs.items()},
                "gpus": None if shown.to_plan is None else list(MEMORY),
            } | shown.history.since(generation, after)

    async def _refresh(self) -> None:
        try:
            await asyncio.to_thread(self._source.refresh)
        except SourceError as error:
            self._error = str(error)
        else:
            self._error, self._answered = "", time.monotonic()
        self._asked = time.monotonic()


def application(source: Source, gpu: int | None = None, others: Others | None = None) -> web.Application:
    """Serve GET / with its assets, /api/state?generation=&after=, and /api/plan?gpu=; `gpu` bytes are its default.

    /api/others has the names of runs to compare with, /api/curves?run= the curves of one, and /api/logs ends of logs.
    """
    page, plans, runs = Page(source), Plans(gpu), others or further_folders({})

    async def state(request: web.Request) -> web.Response:
        try:
            generation, after = int(request.query.get("generation", 0)), int(request.query.get("after", -1))
        except ValueError:
            return web.Response(status=400, text="generation and after must be whole numbers\n")
        return web.json_response(await page.state(generation, after))

    async def plan(request: web.Request) -> web.Response:
        if (name := request.query.get("gpu", "")) not in ("", *MEMORY):
            return web.Response(status=400, text=f"gpu must be one of {', '.join(MEMORY)}\n")
        if source.shown.to_plan is None:
            return web.Response(status=404, text="there is no job to plan\n")
        return web.json_response(plans.answer(source.shown.to_plan, name))

    async def logs(_: web.Request) -> web.Response:
        return web.json_response(source.shown.logs)

    async def names(_: web.Request) -> web.Response:
        return await _or_error(runs.names())

    async def curves(request: web.Request) -> web.Response:
        # It may start a pod, which no other site's page shall do. Browsers write this header, and pages cannot.
        if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return web.Response(status=403, text="only this page may ask for curves\n")
        return await _or_error(runs.curves(request.query.get("run", "")))

    app = web.Application(middlewares=[_guard])
    app.router.add_get("/api/state", state, allow_head=False)
    app.router.add_get("/api/plan", plan, allow_head=False)
    app.router.add_get("/api/logs", logs, allow_head=False)
    app.router.add_get("/api/others", names, allow_head=False)
    app.router.add_get("/api/curves", curves, allow_head=False)
    for path, (name, kind) in ASSETS.items():
        app.router.add_get(path, _asset(name, kind), allow_head=False)
    return app


async def _or_error(answer: Awaitable[object]) -> web.Response:
    try:
        return web.json_response(await answer)
    except SourceError as error:
        return web.Response(status=404, text=str(error))


def _asset(name: str, kind: str) -> Handler:
    text = (files("grpo_cli.ui") / "static" / name).read_text(encoding="utf-8")

    async def asset(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind, charset="utf-8")

    return asset


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests of other sites: names that they point at loopback (DNS rebinding), and all methods but GET."""
    host = request.host.rpartition(":")[0] or request.host
    if host not in (HOST, "localhost"):
        return web.Response(status=403, text=f"this page is at http://{HOST}, not at {host!r}\n", headers=HEADERS)
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        answer = web.Response(status=error.status, text=f"{error.reason}\n")
    answer.headers.update(HEADERS)
    return answer


@asynccontextmanager
async def serving(
    source: Source, port: int, gpu: int | None = None, others: Others | None = None
) -> AsyncIterator[str]:
    """Serve while the context is open; it gives the address. Port 0: any free one. Raises OSError for a used port."""
    runner = web.AppRunner(application(source, gpu, others), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        taken: int = runner.addresses[0][1]
        yield f"http://{HOST}:{taken}/"
    finally:
        await runner.cleanup()
