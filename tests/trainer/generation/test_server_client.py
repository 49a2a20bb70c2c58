"""The HTTP client of an engine, against a server that fails as engines do.

Calls are repeated only where that is safe, and each error names the engine to blame and what it did.
"""

import asyncio
import io
import math
import pickle
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.errors import EngineError, RefusedError
from grpo_workload.generation.servers.http_client import ATTEMPTS, EngineClient
from grpo_workload.generation.servers.waiting import settle
from grpo_workload.pod.engines import abandoned
from support.trainer.launchers import free_ports

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANSWER = {
    "choices": [
        {"index": 1, "text": "b", "token_ids": [7], "logprobs": {"token_logprobs": [None]}, "finish_reason": "length"},
        {
            "index": 0,
            "text": "a",
            "token_ids": [8, 2],
            "logprobs": {"token_logprobs": [-1.5, -2.5]},
            "finish_reason": "stop",
        },
    ]
}


def engine(port, name="engine-3", **sizes):
    return Engine(name=name, pod="pod-3", group="g", host="127.0.0.1", port=port, devices=(0,), **sizes)


@asynccontextmanager
async def client_of(path, handler, deadline=20):
    """Yield a client of a server that answers `path` with `handler`."""
    app = web.Application()
    app.add_routes([web.route("*", path, handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_ports(1)[0]).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield EngineClient(engine(port), session, deadline, retry_wait=0.01)
    finally:
        await runner.cleanup()


class Failing:
    """Handler that fails `times` times and then answers."""

    def __init__(self, times, failure, answer):
        self.calls, self.times, self.failure, self.answer = 0, times, failure, answer

    async def handle(self, request):
        self.calls += 1
        return await self.failure(request) if self.calls <= self.times else web.json_response(self.answer)


async def drop(request):
    request.transport.abort()
    return web.Response()


async def busy(_):
    return web.Response(status=503, text="paused")


async def broken(_):
    return web.Response(status=500, text="shape mismatch in layer 3")


@pytest.mark.parametrize("failure", [drop, busy])
async def test_requests_for_completions_are_repeated(failure):
    handler = Failing(2, failure, ANSWER)
    async with client_of("/v1/completions", handler.handle) as client:
        first, second = await client.complete([1, 2], model="m", num_samples=2, sampling={}, version=5)
    assert handler.calls == 3
    assert (first.token_ids, first.logprobs, first.text, first.finish_reason) == ((8, 2), (-1.5, -2.5), "a", "stop")
    assert (second.token_ids, second.weight_version) == ((7,), 5)
    assert math.isnan(second.logprobs[0]), "null is a log-probability that is not a number"


async def test_experts_that_a_completion_was_routed_to_are_as_the_engine_saved_them():
    routed = np.arange(12, dtype=np.uint16).reshape(3, 2, 2) + 300
    np.save(file := io.BytesIO(), routed)
    choices = [choice | {"routed_experts": b64encode(file.getvalue()).decode()} for choice in ANSWER["choices"]]
    handler = Failing(0, busy, {"choices": choices})
    async with client_of("/v1/completions", handler.handle) as client:
        found = await client.complete([1, 2], model="m", num_samples=2, sampling={}, version=5)
    for completion in found:
        assert completion.routed_experts is not None
        np.testing.assert_array_equal(completion.routed_experts, routed)


UPDATE = r"engine engine-3 \(pod pod-3, 127.0.0.1:\d+\) .*/update_weights"


@pytest.mark.parametrize(
    ("failure", "call", "said", "calls"),
    [
        *((failure, lambda client: client.update({"names": []}), UPDATE, 1) for failure in (drop, busy, broken)),
        (drop, EngineClient.start_update, "lost or refused the connection", 1),
        (busy, lambda client: client.finish_update(1), "answered /finish_weight_update with 503", 1),
        (drop, EngineClient.resume, "lost or refused the connection", ATTEMPTS),
        (broken, EngineClient.resume, "answered /resume with 500: shape mismatch in layer 3", 1),
    ],
)
async def test_attempts_are_bounded_and_no_step_of_an_update_and_no_error_of_the_engine_is_repeated(
    failure, call, said, calls
):
    handler = Failing(99, failure, {})
    async with client_of("/{step}", handler.handle) as client:
        with pytest.raises(EngineError, match=said):
            await call(client)
    assert handler.calls == calls


async def test_the_deadline_ends_a_call_which_is_not_tried_again():
    asked: list[str] = []

    async def never(request):
        asked.append(request.path)
        await asyncio.Event().wait()
        return web.Response()

    async with client_of("/{step}", never, deadline=0.3) as client:
        with pytest.raises(EngineError, match=r"did not answer /start_weight_update within 0.3 s"):
            await client.start_update()
        with pytest.raises(EngineError, match=r"did not answer /pause within 0.3 s"):
            await client.abandon_update()
    assert asked == ["/start_weight_update", "/pause"]


@pytest.mark.parametrize(("times", "calls"), [(0, 3), (1, 4), (2, 5), (3, 6)])
async def test_abandoning_an_update_is_tried_again_after_failures(times, calls):
    """Any call may report an old failure of a worker; an update starts only after the engine has paused."""
    handler = Failing(times, broken, {})
    async with client_of("/{step}", handler.handle) as client:
        await client.abandon_update()
    assert handler.calls == calls


@pytest.mark.parametrize(("mode", "clears"), [("wait", "true"), ("abort", "true"), ("keep", "false")])
async def test_a_pause_drops_what_is_cached_unless_requests_go_on(mode, clears):
    found: list[tuple[str, str]] = []

    async def handle(request):
        found.append((request.query["mode"], request.query["clear_cache"]))
        return web.json_response({})

    async with client_of("/pause", handle) as client:
        await client.pause(mode)
    assert found == [(mode, clears)]


@pytest.mark.parametrize(("version", "goes_on"), [("default", False), ("3", True), ("0", True), (abandoned(0), True)])
async def test_requests_and_updates_of_an_earlier_attempt_end_where_an_engine_goes_on(version, goes_on):
    steps: list[str] = []

    async def handle(request):
        steps.append(request.match_info["step"] + request.query.get("mode", ""))
        return web.json_response({"weight_version": version})

    async with client_of("/{step}", handle) as client:
        await client.forget_attempt()
    assert steps == ["weight_info"] + ["pauseabort", "start_weight_update", "finish_weight_update"] * goes_on


@pytest.mark.parametrize(
    ("started", "version", "is_ready"),
    [
        (2, "default", True),  # started for this attempt
        (1, "default", False),  # its first push was cut: its pod will start it again
        (1, "7", False),  # its pod does not know of this attempt yet, and may find it too busy to go on
        (1, abandoned(1), False),
        (1, abandoned(2), True),
    ],
)
async def test_an_engine_is_an_earlier_attempts_until_its_pod_lets_it_go_on(started, version, is_ready):
    found = {"world_size": 1, "data": [{"id": f"engine-3.{started}.abcd"}], "weight_version": version}

    async def handle(_):
        return web.json_response(found)

    async with client_of("/{path:.*}", handle) as client:
        client = replace(client, attempt=2)
        if not is_ready:
            for ask in (client.is_ready, client.identify):
                with pytest.raises(EngineError, match="is an earlier attempt's: its pod has not begun attempt 2"):
                    await ask()
            found["weight_version"] = abandoned(2)
        await client.is_ready()
        found["weight_version"] = "8"
        assert await client.identify() == f"engine-3.{started}.abcd", "also when this attempt has pushed to it"
        for other in ("engine-3.1.ffff", "somebody-elses"):
            found["data"] = [{"id": other}]
            with pytest.raises(EngineError, match="is an earlier attempt's"):
                await client.identify()


async def test_an_engine_inside_an_update_finishes_it_before_the_next():
    steps: list[str] = []

    async def handle(request):
        steps.append(request.match_info["step"])
        is_inside = "finish_weight_update" not in steps
        return await broken(request) if is_inside and steps[-1] == "start_weight_update" else web.json_response({})

    async with client_of("/{step}", handle) as client:
        await client.abandon_update()
    assert steps == ["pause", "start_weight_update", "finish_weight_update"] * 2


async def test_an_engine_that_cannot_abandon_an_update_is_named():
    async with client_of("/{step}", Failing(99, broken, {}).handle) as client:
        with pytest.raises(EngineError, match=r"engine engine-3 .* answered /pause with 500"):
            await client.abandon_update()


async def test_an_engine_of_another_size_is_refused():
    async def world_size(_):
        return web.json_response({"world_size": 4})

    async with client_of("/get_world_size", world_size) as client:
        with pytest.raises(EngineError, match="has 4 workers, but the contract says 1"):
            await client.identify()


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (400, RefusedError, "answered /v1/completions with 400: too long"),
        (404, EngineError, "its container has restarted"),
    ],
)
async def test_a_refused_prompt_and_a_restarted_engine_raise_different_errors(status, kind, text):
    async def refuse(_):
        return web.Response(status=status, text="too long")

    async with client_of("/v1/completions", refuse) as client:
        with pytest.raises(kind, match=text):
            await client.complete([1], model="m", num_samples=1, sampling={}, version=0)


async def test_an_aborted_completion_is_an_error():
    choice = ANSWER["choices"][0] | {"index": 0, "finish_reason": "abort"}
    async with client_of("/v1/completions", Failing(0, drop, {"choices": [choice]}).handle) as client:
        with pytest.raises(EngineError, match="ended an unfinished completion with 'abort'"):
            await client.complete([1], model="m", num_samples=1, sampling={}, version=0)


async def test_the_dead_engine_is_blamed_and_not_the_others():
    async def fails(error):
        raise error

    async with client_of("/health", Failing(0, drop, {}).handle) as living:
        dead = EngineClient(engine(free_ports(1)[0], "dead"), living.session, 5)
        with pytest.raises(EngineError, match=r"engine dead \(pod pod-3"):
            await settle(
                [living, dead],
                [fails(EngineError(living.engine, "lost its group")), fails(RuntimeError("connection reset"))],
            )


def test_an_error_can_be_pickled_and_sent_to_other_ranks():
    error = EngineError(engine(80), "failed")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.engine) == (str(error), error.engine)
