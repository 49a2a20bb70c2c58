"""Wrong, late and missing messages from and to a pod: nothing hangs, and none of them is an answer."""

import asyncio
import os
import struct
import time

import aiohttp
import pytest
from aiohttp import web

from grpo_spec.contract import EnvironmentPodContract, JobRef
from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import EnvironmentLostError
from grpo_workload.environments.pods import messages
from grpo_workload.environments.pods.messages import Answer, Call, End, OneCall, Open, Reset, pack
from grpo_workload.environments.pods.server import PodServer
from support.trainer.agents import COUNTER, act, ask, make_config
from support.trainer.environment_pods import JOB, connect

CONFIG = make_config("add", environments=[COUNTER])
NONSENSE = {
    "text": "hello",
    "short": b"\x00",
    "no message": struct.pack(">I", 100) + b"{}",
    "no JSON": struct.pack(">I", 3) + b"{{{",
    "deep": struct.pack(">I", 200_000) + b"[" * 200_000,
    "a list": struct.pack(">I", 2) + b"[]",
    "a number as text": struct.pack(">I", 11) + b'{"text": 3}',
    "a reward that is none": struct.pack(">I", 15) + b'{"reward": NaN}',
    "a pickle": b"\x80\x04N.",
}


@pytest.fixture
async def serve():
    """Serve an application in this event loop, and return its address."""
    runners = []

    async def begin(application):
        runners.append(web.AppRunner(application, shutdown_timeout=0.1))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    yield begin
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def rank():
    """Connect a rank, which asks nobody for what there is."""
    connected = []

    def begin(*addresses, **settings):
        connected.append(connect(CONFIG, *addresses, **settings))
        return connected[-1]

    yield begin
    for one in connected:
        one.close()


@pytest.fixture
async def pod(serve):
    """Serve a pod in this process."""
    servers = []

    async def begin(sessions=1, job=JOB, is_local=True):
        parts = {"tools": CONFIG.tools, "environments": CONFIG.environments, "group": "games"}
        contract = EnvironmentPodContract(job=job, sessions=sessions, is_local=is_local, **parts)
        servers.append(PodServer(contract))
        assert await servers[-1].begin(os.environ) is None
        return servers[-1], await serve(servers[-1].application())

    yield begin
    for server in servers:
        server.close()


def pretend(*answers):
    """Return an application that answers the first requests of a session like this, and then none."""

    async def session(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            await socket.receive()
            for part in answer if isinstance(answer, list) else [answer]:
                await (socket.send_str(part) if isinstance(part, str) else socket.send_bytes(part))
        while (await socket.receive()).type is aiohttp.WSMsgType.BINARY:
            pass
        return socket

    application = web.Application()
    application.router.add_get("/session", session)
    return application


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_from_a_pod_loses_the_episode(serve, rank, kind):
    sessions = rank(address := await serve(pretend(pack(Answer()), NONSENSE[kind])))
    message = rf"environmentPods.groups\[games\]: {address} was lost in reset: it sent something that is no answer"
    with pytest.raises(EnvironmentLostError, match=message) as caught:
        await act(sessions)
    assert caught.value.cause == "connection"


async def test_more_answers_than_were_asked_for_and_too_long_ones(serve, rank, monkeypatch):
    sessions = rank(await serve(pretend(pack(Answer()), [pack(Answer(text="a")), pack(Answer(text="b"))])))
    session = sessions.open({}, 1)
    assert await session.reset() == "a"
    await asyncio.sleep(0.2)
    with pytest.raises(EnvironmentLostError, match="it sent what nobody asked for"):
        await ask(session, "total")
    await session.close()
    monkeypatch.setattr("grpo_workload.environments.pods.link.MAX_FRAME", 1000)
    sessions = rank(await serve(pretend(pack(Answer()), pack(Answer(text="x" * 2000)))))
    with pytest.raises(EnvironmentLostError, match=r"it broke the connection: WebSocketError: .* 1000"):
        await act(sessions)


async def test_a_pod_that_answers_pings_alone_has_a_deadline(serve, rank, monkeypatch):
    monkeypatch.setattr("grpo_workload.environments.pods.session.MARGIN_SECONDS", 0.2 - 30)
    sessions = rank(await serve(pretend(pack(Answer()), pack(Answer()))), wants_state=True)
    session = sessions.open({}, 1)
    await session.reset()
    begun = time.monotonic()
    with pytest.raises(EnvironmentLostError, match=r"was lost in get_reward: it did not answer within 0.2 s"):
        await session.end()
    assert time.monotonic() - begun < 5
    await session.close()


async def test_what_opens_no_session_is_avoided_and_said_when_nothing_else_is_there(serve, rank, monkeypatch):
    monkeypatch.setattr("grpo_workload.environments.pods.host.AWAY_SECONDS", 1.0)
    monkeypatch.setattr("grpo_workload.environments.pods.link.CONNECT_SECONDS", 0.5)
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    addresses = {
        "nobody.invalid:29502": "it cannot be reached: ClientConnectorDNSError",
        "127.0.0.1:1": "it cannot be reached: ClientConnectorError: .* 127.0.0.1:1",
        await serve(web.Application()): "it cannot be reached: WSServerHandshakeError: 404",
        await serve(pretend()): "it did not open a session within 0.5 s",
        f"127.0.0.1:{silent.sockets[0].getsockname()[1]}": "it did not open a session within 0.5 s",
        await serve(pretend(NONSENSE["text"])): "it sent something that is no answer: text",
        await serve(pretend(pack(Answer(away="is not ready")))): "it is not ready",
    }
    for address, why in addresses.items():
        with pytest.raises(EnvironmentLostError, match=rf"0 of 1 pod could be used for .* s \({address}: {why}"):
            await act(rank(address))
    good = await serve(pretend(pack(Answer()), pack(Answer(text="begun")), pack(Answer(text="3"))))
    sessions = rank(*addresses, good)
    assert (await act(sessions, ("total", {})))[0].content == "3"
    silent.close()


async def test_a_connection_that_stops_forwarding_is_found_on_both_sides(pod, rank, monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 1.0)
    server, address = await pod()
    host, port = address.split(":")
    stopped = asyncio.Event()

    async def forward(reader, writer):
        while part := await reader.read(1 << 16):
            if stopped.is_set():  # what comes is taken, and goes nowhere: no side is told
                continue
            writer.write(part)

    async def accept(reader, writer):
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    sessions = rank(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    session = sessions.open({}, 1)
    await session.reset()
    await asyncio.sleep(3)
    assert await ask(session, "total") == "3", "silence alone ends nothing"
    assert server._num_open == 1
    stopped.set()
    begun = time.monotonic()
    with pytest.raises(EnvironmentLostError, match=r"was lost in a call: it broke the connection: .*No PONG"):
        await ask(session, "total")
    assert time.monotonic() - begun < 10
    await session.close()
    while server._num_open:
        assert time.monotonic() - begun < 10
        await asyncio.sleep(0.1)
    proxy.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"job": JobRef(namespace="ns", name="other", uid="other")}, "it is a pod of another job, ns/other"),
        ({"is_local": False}, ".*403"),  # what runs in a pod opens no session there
    ],
)
async def test_a_pod_serves_its_own_job_alone(pod, rank, settings, why, monkeypatch):
    monkeypatch.setattr("grpo_workload.environments.pods.host.AWAY_SECONDS", 0.5)
    _, address = await pod(**settings)
    with pytest.raises(EnvironmentLostError, match=rf"\({address}: {why}"):
        await act(rank(address))


async def test_nonsense_to_a_pod_costs_that_connection_alone(pod, rank):
    server, address = await pod(sessions=2)
    opened = pack(Open(job=JOB.uid, environment="counter", seed=1, wants_reward=True, wants_state=False), b"no row")
    total = Call(calls=[OneCall(name="total", arguments={})], seconds=60)
    cases = [
        *([one] for one in NONSENSE.values()),
        *([opened, one] for one in NONSENSE.values()),
        [pack(Reset())],
        [opened, opened],
        [opened, pack(total)],  # before reset
        [opened, pack(End())],
    ]
    async with aiohttp.ClientSession() as client:
        for case in cases:
            async with client.ws_connect(f"http://{address}/session") as socket:
                for frame in case:
                    await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
                found = [message async for message in socket]
                assert len(found) == (case[0] == opened), case
                assert socket.close_code in (1002, 1011), case
        async with client.ws_connect(f"http://{address}/session") as socket:  # a row that does not unpickle
            await socket.send_bytes(opened)
            await socket.send_bytes(pack(Reset()))
            answers = [messages.unpack_answer((await socket.receive()).data)[0] for _ in range(2)]
            assert "its request raised UnpicklingError" in answers[1].error
    assert server._num_open == 0
    sessions = rank(address)
    for _ in range(3):
        assert (await act(sessions, ("total", {})))[0].content == "3"
        assert server._num_open == 0, "its place is free before the rank hears of the end"


async def test_rows_that_are_too_long_for_a_frame_are_refused(rank, monkeypatch):
    monkeypatch.setattr("grpo_workload.environments.pods.host.MAX_BEHIND", 1000)
    message = r"environments\[counter\]: a row of the dataset has \d+ bytes, and 1000 can be"
    with pytest.raises(ConfigError, match=message):
        rank("127.0.0.1:1").open({"text": "x" * 2000}, 1)
