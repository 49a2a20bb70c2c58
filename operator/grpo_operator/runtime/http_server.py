"""A small HTTP server in the operator's event loop: for probes and for metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.Response]]


class HttpServer:
    """Serves handlers by their path, on all addresses."""

    def __init__(self, port: int, handlers: Mapping[str, Handler]) -> None:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
        self._runner, self._port = web.AppRunner(app, access_log=None), port

    async def start(self) -> None:
        """Start serving. Raises OSError if the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, port=self._port).start()

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()
