"""Meeting of the pods of one engine before vLLM starts. By it, each knows at once that another one has ended.

The first pod listens, and each other one keeps a WebSocket to it for as long as its part of the engine runs. vLLM alone
would let a new pod join what a pod before it has left, and its workers wait for ever for one that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import WSMsgType, web

from grpo_spec.contract import Engine
from grpo_workload.pod.contract_file import ThisPod

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two signs of life; a pod without one for half as long again is lost
RETRY = 1.0  # seconds between two tries to reach the first pod


@dataclass(frozen=True, slots=True)
class Node:
    """A pod's place in an engine over several pods."""

    rank: int
    master_port: int  # port of the first pod on which vLLM's workers meet


class Meeting:
    """A pod's meeting with the others of its engine."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.node: asyncio.Future[Node] = loop.create_future()
        """This pod's place, once all pods are here."""
        self.lost: asyncio.Future[str] = loop.create_future()
        """Name of the first other pod that has ended or does not answer, once there is one."""

    def _note_lost(self, pod: str) -> None:
        if not self.lost.done():
            self.lost.set_result(pod)


@asynccontextmanager
async def meeting(pod: ThisPod, engine: Engine) -> AsyncIterator[Meeting]:
    """Meet the other pods of `engine`, at once or later; leaving the context tells them that this one has ended.

    Raises OSError if the first pod cannot listen on the engine's meeting port.
    """
    if pod.pod == engine.pod:
        leader = _Leader(pod, engine)
        runner = web.AppRunner(leader.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=engine.meeting_port).start()
            yield leader
        finally:
            await leader.close()
            await runner.cleanup()
    else:
        follower = Meeting()
        following = asyncio.create_task(_follow(follower, pod, engine))
        try:
            yield follower
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


class _Leader(Meeting):
    def __init__(self, pod: ThisPod, engine: Engine) -> None:
        super().__init__()
        self._attempt = str(pod.contract.attempt)
        self._ranks = {name: rank for rank, name in enumerate(engine.pods)}
        self._here: dict[str, web.WebSocketResponse] = {}

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/meet", self._meet)])
        return app

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._here.values()))

    async def _meet(self, request: web.Request) -> web.StreamResponse:
        name, attempt = request.query.get("pod", ""), request.query.get("attempt")
        if attempt != self._attempt or not self._ranks.get(name):
            return web.Response(status=409, text="this engine is of another attempt, or has no such pod\n")
        if self.node.done():
            self._note_lost(name)  # another pod of this name came in place of the one that was here
            return web.Response(status=409, text="this engine has begun without you\n")
        one = self._here[name] = web.WebSocketResponse(heartbeat=HEARTBEAT)
        await one.prepare(request)
        logger.info("pod %s is here; %d of %d pods are", name, 1 + len(self._here), len(self._ranks))
        if len(self._here) == len(self._ranks) - 1 and not self.node.done():
            port = _free_port()
            self.node.set_result(Node(0, port))
            await asyncio.gather(*(there.send_str(str(port)) for there in self._here.values()), return_exceptions=True)
        async for _ in one:  # it says nothing: the end is what counts
            pass
        if self._here.get(name) is one:
            if self.node.done():
                self._note_lost(name)
            else:
                del self._here[name]
        return one


async def _follow(own: Meeting, pod: ThisPod, engine: Engine) -> None:
    url, rank = f"http://{engine.host}:{engine.meeting_port}/meet", engine.pods.index(pod.pod)
    query = {"pod": pod.pod, "attempt": str(pod.contract.attempt)}
    logger.info("waits for pod %s at %s:%d", engine.pod, engine.host, engine.meeting_port)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=HEARTBEAT)) as session:
        while not own.node.done():
            with suppress(aiohttp.ClientError, OSError):  # it is not there yet, or is still one of the past
                async with session.ws_connect(url, params=query, heartbeat=HEARTBEAT) as leader:
                    if (said := await leader.receive()).type is not WSMsgType.TEXT:
                        continue
                    own.node.set_result(Node(rank, int(said.data)))
                    with suppress(aiohttp.ClientError, OSError):
                        async for _ in leader:
                            pass
                    own._note_lost(engine.pod)
                    return
            await asyncio.sleep(RETRY)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
