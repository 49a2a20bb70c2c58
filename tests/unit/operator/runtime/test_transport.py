"""Requests to a real HTTP server: deadlines, Retry-After, answers that are none, rights that lack, watches."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import kube_config

from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime import transport as module
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ForbiddenError, is_temporary
from grpo_operator.runtime.transport import Transport, connect
from grpo_spec.reasons import Reason

PODS = "/api/v1/namespaces/ns/pods"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """A server that gives the answers in turn, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked = 0
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self.http = TestServer(application)

    @property
    def url(self) -> str:
        return str(self.http.make_url("")).rstrip("/")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        return await self.answers[min(self.asked, len(self.answers)) - 1](request)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """A server, with the transport of a client of it."""
    made = ApiServer()
    async with made.http:
        made.transport = Transport(connect(client.Configuration(host=made.url)), Instruments())
        yield made
        await made.transport.close()


def says(status: int, message: str = "", **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        dashed = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"kind": "Status", "message": message}, status=status, headers=dashed)

    return answer


def writes(text: str, *, complete: bool = True) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(text) + (0 if complete else 100)
        await response.prepare(request)
        await response.write(text.encode())
        if not complete:
            request.transport.close()
        return response

    return answer


async def never(request: web.Request) -> web.StreamResponse:
    """Answer nothing until the client gives up."""
    await asyncio.Event().wait()
    raise AssertionError


async def hangs_up(request: web.Request) -> web.StreamResponse:
    request.transport.close()
    return web.Response()


def streams(*lines: str, ends: bool = True) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:
            await response.write(line.encode() + b"\n")
        if not ends:
            await asyncio.Event().wait()
        return response

    return answer


async def test_a_server_that_never_answers_fails_the_request_at_its_deadline(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEADLINE_SECONDS", 0.2)
    server.answers = [never]
    with pytest.raises(TimeoutError, match=f"no answer to list Pod \\({PODS}\\) within"):
        await server.transport.request("list", "Pod", PODS)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_to_a_busy_server_is_repeated_when_it_says(server: ApiServer, status: int) -> None:
    server.answers = [says(status, Retry_After="0"), says(status, Retry_After="0"), writes('{"kind": "PodList"}')]
    assert await server.transport.request("list", "Pod", PODS) == {"kind": "PodList"}
    assert server.asked == 3


async def test_a_server_that_asks_for_more_patience_than_there_is_fails_the_request_at_once(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEADLINE_SECONDS", 10.0)
    for header in ({"Retry_After": "10"}, {"Retry_After": "3600"}):
        server.answers, server.asked = [says(429, "too many requests", **header)], 0
        with pytest.raises(ApiException) as failed:
            await server.transport.request("list", "Pod", PODS)
        assert (failed.value.status, server.asked) == (429, 1)
        assert is_temporary(failed.value)


@pytest.mark.parametrize(("status", "headers"), [(503, {}), (500, {"Retry_After": "0"}), (409, {"Retry_After": "0"})])
async def test_other_answers_are_not_repeated(server: ApiServer, status: int, headers: dict[str, str]) -> None:
    server.answers = [says(status, **headers), says(200)]
    with pytest.raises(ApiException) as failed:
        await server.transport.request("list", "Pod", PODS)
    assert (failed.value.status, server.asked) == (status, 1)


async def test_a_lacking_right_is_named_and_another_refusal_is_not_taken_for_one(server: ApiServer) -> None:
    said = 'pods is forbidden: User "system:serviceaccount:a:b" cannot list resource "pods"'
    server.answers = [says(403, said)]
    with pytest.raises(ForbiddenError, match="may not list Pod"):
        await server.transport.request("list", "Pod", PODS)
    with pytest.raises(ForbiddenError, match="may not watch pods"):
        await anext(server.transport.stream(PODS, []))
    server.answers = [says(403, "exceeded quota: small")]
    with pytest.raises(ApiException):
        await server.transport.request("list", "Pod", PODS)


@pytest.mark.parametrize(
    "answer",
    [writes('{"kind": "Po'), writes('{"kind": "PodList"', complete=False), hangs_up],
    ids=["no JSON", "cut off", "no answer"],
)
async def test_an_answer_that_is_none_is_a_fault_that_passes(server: ApiServer, answer: Answer) -> None:
    server.answers = [answer]
    with pytest.raises(aiohttp.ClientError) as failed:
        await server.transport.request("list", "Pod", PODS)
    assert is_temporary(failed.value)


async def test_what_is_sent_arrives_as_it_is(server: ApiServer) -> None:
    sent: list[tuple[object, ...]] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append((request.method, dict(request.query), request.content_type, await request.json()))
        return web.json_response({})

    server.answers = [answer]
    body = {"reason": Reason.NAME_TAKEN, "list": [1, 2.5, None, True, {"key": "ü%20"}]}
    await server.transport.request("create", "Pod", PODS, body=body, query_params=[("dryRun", "All"), ("a b", "c&d")])
    as_json = {"reason": "NameTaken", "list": [1, 2.5, None, True, {"key": "ü%20"}]}
    assert sent == [("POST", {"dryRun": "All", "a b": "c&d"}, "application/json", as_json)]
    assert body["reason"] is Reason.NAME_TAKEN


@pytest.mark.parametrize("answer", [hangs_up, never, says(500), writes("{")], ids=["hangs up", "silent", "500", "none"])
async def test_an_event_that_is_not_written_is_no_failure_of_the_pass(
    server: ApiServer, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is never:  # the others must be read in time on a busy machine too
        monkeypatch.setattr(module, "DEADLINE_SECONDS", 1.0)
    server.answers = [answer]
    job = {"metadata": {"name": "job", "namespace": "ns", "uid": "1", "resourceVersion": "1"}}
    await Cluster(server.transport).emit(job, kind="Normal", reason="Any", message="", now=datetime.now(UTC))
    assert server.asked == 1


async def test_a_watch_yields_what_is_sent_until_the_server_ends_it(server: ApiServer) -> None:
    event = {"type": "ADDED", "object": {"data": {"contract.json": "x" * 1_500_000}}}  # as large as etcd allows
    server.answers = [streams(json.dumps(event), '{"type": "BOOKMARK"}')]
    assert [sent async for sent in server.transport.stream(PODS, [])] == [event, {"type": "BOOKMARK"}]


async def test_a_watch_that_falls_silent_ends(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 1.0)
    server.answers = [streams('{"type": "BOOKMARK"}', ends=False)]
    watch = server.transport.stream(PODS, [])
    assert await anext(watch) == {"type": "BOOKMARK"}
    with pytest.raises(TimeoutError):
        await anext(watch)


async def test_a_watch_that_sends_no_json_or_is_refused_breaks(server: ApiServer) -> None:
    server.answers = [streams('{"type": "BOOK')]
    with pytest.raises(ValueError):  # noqa: PT011  # which one is the JSON library's choice
        await anext(server.transport.stream(PODS, []))
    server.answers = [says(410, "too old resource version")]
    with pytest.raises(ApiException) as failed:
        await anext(server.transport.stream(PODS, []))
    assert failed.value.status == 410


def _configure(server: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `configure` find a kubeconfig for this server."""
    named = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "config").write_text(yaml.safe_dump(named))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config"))


async def test_requests_go_through_the_proxy_that_the_environment_names(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _configure("http://api.invalid", tmp_path, monkeypatch)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    server.answers = [says(200, "by proxy")]
    transport = Transport(await module.configure(), Instruments())
    assert (await transport.request("get", "Pod", f"{PODS}/one"))["message"] == "by proxy"
    await transport.close()


async def test_watches_of_many_namespaces_leave_connections_for_requests(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _configure(server.url, tmp_path, monkeypatch)
    transport = Transport(await module.configure(watches=150), Instruments())
    server.answers = [streams('{"type": "BOOKMARK"}', ends=False)]
    watches = [transport.stream(PODS, []) for _ in range(150)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(anext(watch) for watch in watches))
        server.answers = [says(200)]
        await transport.request("get", "Pod", f"{PODS}/one")
    await asyncio.gather(*(watch.aclose() for watch in watches))
    await transport.close()
