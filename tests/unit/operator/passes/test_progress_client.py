"""The operator reads what is right of a launcher's progress, and ignores answers that are none or redirects."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from grpo_operator.passes.progress_client import MAX_BYTES, HttpProgress
from grpo_spec.reports import Progress


async def _fetch(text: str = "", redirect: str = "") -> Progress | None:
    """Return what is read of a pod that answers with this text, or with a redirect."""

    async def progress(_: web.Request) -> web.StreamResponse:
        if redirect:
            raise web.HTTPFound(redirect)
        return web.Response(text=text, content_type="application/json")

    async def elsewhere(_: web.Request) -> web.Response:
        return web.Response(text=Progress(step=9).model_dump_json(by_alias=True), content_type="application/json")

    application, source = web.Application(), HttpProgress()
    application.router.add_get("/progress", progress)
    application.router.add_get("/elsewhere", elsewhere)
    async with TestServer(application) as server:
        try:
            return await source.fetch(server.host, server.port or 0)
        finally:
            await source.close()


async def test_progress_is_read() -> None:
    said = Progress(step=3, phase="Training")
    assert await _fetch(said.model_dump_json(by_alias=True)) == said


async def test_of_a_strange_answer_what_is_right_is_read() -> None:
    text = '{"step": 3, "reward": NaN, "metrics": {"loss": 1e999, "kl": 0.5}, "phase": null, "new": [1], "age": "x"}'
    assert await _fetch(text) == Progress(step=3, metrics={"kl": 0.5})


@pytest.mark.parametrize(
    "text",
    ["no json", "{}" + " " * MAX_BYTES, "[1]", "[" * 100_000, '{"step": ' + "9" * 100_000 + "}x"],
    ids=["nonsense", "endless", "no object", "deep", "huge"],
)
async def test_an_answer_that_is_no_progress_is_ignored(text: str) -> None:
    assert await _fetch(text) is None


async def test_a_redirect_is_not_followed() -> None:
    assert await _fetch(redirect="/elsewhere") is None
