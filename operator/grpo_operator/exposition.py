"""GET /metrics of the operator."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


class MetricsServer:
    """Serves a registry on all addresses, from the operator's own loop: what is scraped does not change meanwhile."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._registry, self._port = registry, port
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Begin to serve. Raises OSError when the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, port=self._port).start()

    async def close(self) -> None:
        """End it."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
