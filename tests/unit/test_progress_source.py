"""What pods answer to the operator's question is their business; what it costs the operator is not."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from grpo_operator.progress import MAX_BYTES, HttpProgress
from grpo_workload.contract import Progress


@dataclass
class Pod:
    """A pod that answers what the test puts into it."""

    server: TestServer
    text: str = ""
    redirect: str = ""


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async def progress(_: web.Request) -> web.StreamResponse:
        if made.redirect:
            raise web.HTTPFound(made.redirect)
        return web.Response(text=made.text, content_type="application/json")

    async def elsewhere(_: web.Request) -> web.Response:
        return web.Response(text=Progress(step=9).model_dump_json(by_alias=True), content_type="application/json")

    application = web.Application()
    application.router.add_get("/progress", progress)
    application.router.add_get("/elsewhere", elsewhere)
    async with TestServer(application) as server:
        made = Pod(server)
        yield made


async def _fetch(pod: Pod) -> Progress | None:
    source = HttpProgress()
    try:
        return await source.fetch(pod.server.host, pod.server.port or 0)
    finally:
        await source.close()


async def test_progress_is_read(pod: Pod) -> None:
    pod.text = Progress(step=3, phase="Training").model_dump_json(by_alias=True)
    told = await _fetch(pod)
    assert told is not None
    assert (told.step, told.phase) == (3, "Training")


@pytest.mark.parametrize("text", ["no json", "{}" + " " * MAX_BYTES], ids=["nonsense", "endless"])
async def test_what_cannot_be_progress_is_unknown(pod: Pod, text: str) -> None:
    pod.text = text
    assert await _fetch(pod) is None


async def test_nobody_else_is_asked_because_a_pod_says_so(pod: Pod) -> None:
    pod.redirect = "/elsewhere"
    assert await _fetch(pod) is None
