"""Ranks wait for engines whose nodes become free one after another, and name one that does not come.

The engines' health is served over real HTTP; each question to one of them moves the test's clock by 20 s. Calls that
nobody waits for any longer are not made: they could reach the engine's next process.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import count

import aiohttp
import pytest
from aiohttp import web

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.waiting import settle, those_that_come, unless_lost, until_all_healthy
from grpo_workload.pod.engines import abandoned
from support.trainer.launchers import free_ports

NEVER = 10**9


@pytest.mark.parametrize(("first", "second", "late"), [(500, 1000, None), (500, NEVER, "second"), (0, 700, "second")])
async def test_the_limit_counts_from_the_last_engine_that_became_healthy(first, second, late):
    """`first`, `second`: the time from which the engine is healthy."""
    seconds = count(step=20)
    now = 0

    def answer(ready_at):
        async def health(_):
            nonlocal now
            now = next(seconds)
            return web.Response(status=200 if now >= ready_at else 503)

        app = web.Application()
        app.router.add_get("/health", health)
        return app

    async with AsyncExitStack() as stack:
        clients = []
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for name, ready_at, port in zip(("first", "second"), (first, second), free_ports(2), strict=True):
            runner = web.AppRunner(answer(ready_at))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", port).start()
            engine = Engine(name=name, pod=name, group="g", host="127.0.0.1", port=port, devices=(0,))
            clients.append(EngineClient(engine, session, 5))
        waiting = until_all_healthy(clients, limit=600, poll=0.001, clock=lambda: now)
        if late is None:
            await waiting
            assert now >= 1000
        else:
            with pytest.raises(EngineError, match="was not ready within 600 s") as error:
                await waiting
            assert error.value.engine.name == late


async def test_an_engine_that_goes_on_is_waited_for_until_its_pod_has_begun_the_attempt():
    looks = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal looks
        looks += request.path == "/weight_info"
        version = abandoned(1) if looks % 3 == 0 else "7"
        return web.json_response({"data": [{"id": "e.0.abcd"}], "weight_version": version})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        engine = Engine(name="e", pod="e", group="g", host="127.0.0.1", port=port, devices=(0,))
        await until_all_healthy([EngineClient(engine, session, 5, attempt=1)], limit=600, poll=0.001)
        assert looks == 3
        elastic = EngineClient(engine, session, 5, attempt=1)
        assert await those_that_come([elastic], limit=600, poll=0.001) == [elastic]
        assert looks == 6


async def test_elastic_engines_are_waited_for_only_if_their_hosts_exist():
    async with aiohttp.ClientSession() as session:
        (port,) = free_ports(1)
        absent, silent = (
            EngineClient(Engine(name=host, pod=host, group="g", host=host, port=port, devices=(0,)), session, 5)
            for host in ("engine.invalid", "127.0.0.1")
        )
        assert await asyncio.wait_for(those_that_come([absent], limit=600, poll=0.01), 5) == []
        assert await those_that_come([silent], limit=0.1, poll=0.01) == []


async def test_calls_that_are_given_up_end():
    ended = []

    async def call(name):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    lost: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
    engine = Engine(name="a", pod="a", group="g", host="h", port=1, devices=(0,))
    waiting = asyncio.ensure_future(unless_lost(settle([], [call("one"), call("two")]), [lost]))
    await asyncio.sleep(0)
    lost.set_result(EngineError(engine, "is lost"))
    with pytest.raises(EngineError, match="is lost"):
        await waiting
    await asyncio.sleep(0.01)
    assert sorted(ended) == ["one", "two"]
