"""The page /metrics of the operator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


def metrics_page(registry: CollectorRegistry) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a page that shows a registry. In the operator's event loop, no metric changes during a scrape."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return answer
