"""The operator reads what is right of a launcher's progress, and ignores answers that are none or redirects."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from grpo_operator.passes.progress_client import MAX_BYTES, HttpProgress
from grpo_spec.reports import Progress


@dataclass
class Pod:
    """A pod that answers with `text`, or with a redirect."""

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
    progress = await _fetch(pod)
    assert (progress.step, progress.phase) == (3, "Training")


async def test_of_a_strange_answer_what_is_right_is_read(pod: Pod) -> None:
    pod.text = (
        '{"step": 3, "reward": NaN, "metrics": {"loss": 1e999, "kl": 0.5}, "phase": null, "new": [1], "age": "x"}'
    )
    assert await _fetch(pod) == Progress(step=3, metrics={"kl": 0.5})


@pytest.mark.parametrize(
    "text",
    ["no json", "{}" + " " * MAX_BYTES, "[1]", "[" * 100_000, '{"step": ' + "9" * 100_000 + "}x"],
    ids=["nonsense", "endless", "no object", "deep", "huge"],
)
async def test_an_answer_that_is_no_progress_is_ignored(pod: Pod, text: str) -> None:
    pod.text = text
    assert await _fetch(pod) is None


async def test_a_redirect_is_not_followed(pod: Pod) -> None:
    pod.redirect = "/elsewhere"
    assert await _fetch(pod) is None
