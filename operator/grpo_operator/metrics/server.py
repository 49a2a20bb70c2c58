"""The HTTP server of the operator's /metrics."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


class MetricsServer:
    """Serves a registry on all addresses, in the operator's event loop: no metric changes during a scrape."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._registry, self._port = registry, port
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Start serving. Raises OSError if the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, port=self._port).start()

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
