"""The HTTP server of an environment pod: its state, and sessions, each over a WebSocket.

A session lives as long as its connection. Both sides ping, so one whose rank has vanished ends too, and a process that
a call keeps busy is killed with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import WSCloseCode, WSMsgType, web

from grpo_spec.contract import EnvironmentPodContract
from grpo_spec.errors import ConfigError
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from grpo_spec.words import counted
from grpo_workload.environments.base import (
    EnvironmentLostError,
    EpisodeTimeoutError,
    Session,
    SessionRequest,
    ToolCall,
)
from grpo_workload.environments.pods import messages
from grpo_workload.environments.pods.messages import (
    DESCRIBE_PATH,
    MAX_FRAME,
    READY_PATH,
    SESSION_PATH,
    Answer,
    Call,
    End,
    InvalidMessageError,
    Open,
    Reset,
    State,
)
from grpo_workload.environments.processes import Processes
from grpo_workload.environments.session import EpisodeSession

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 10.0  # for the first request of a connection
_CLOSE_SECONDS = 1.0


class PodServer:
    """Serves the processes of one pod."""

    def __init__(self, contract: EnvironmentPodContract) -> None:
        """Serve nothing yet; `begin` starts the processes."""
        self._contract = contract
        self._names = {one.name for one in contract.environments}
        self._processes: Processes | None = None
        self._state = State(away="imports users' modules")
        self._num_open = 0
        self._sockets: set[web.WebSocketResponse] = set()

    def application(self) -> web.Application:
        """Return what aiohttp serves."""
        application = web.Application()
        application.router.add_get(READY_PATH, self._answer_ready)
        application.router.add_get(DESCRIBE_PATH, self._answer_describe)
        application.router.add_get(SESSION_PATH, self._serve_session)
        application.on_shutdown.append(self._end_sessions)
        return application

    async def begin(self, environ: Mapping[str, str]) -> Outcome | None:
        """Start the processes, and wait until they are ready; they end with the calling thread.

        Returns what has failed, which is also told to all who ask; None if nothing has.
        """
        try:
            self._processes = Processes(self._contract.tools, self._contract.environments, environ)
            self._state = State(description=await self._processes.ready())
        except ConfigError as error:
            why = f"{error} (for environment pods, podTemplate of their group holds, and spec.podTemplate does not)"
            self._state = State(refused=why, away=f"is refused: {why}")
            return self._failed(ExitCode.CONFIG_ERROR, Reason.CONFIG_ERROR, why)
        except EnvironmentLostError as error:
            self._state = State(away=f"is not ready: {error}")
            return self._failed(ExitCode.ENVIRONMENT_FAILED, Reason.ENVIRONMENT_FAILED, str(error))
        logger.info("ready for %d sessions", self._contract.sessions)
        return None

    def close(self) -> None:
        """End all processes."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _failed(self, exit_code: ExitCode, reason: Reason, why: str) -> Outcome:
        logger.error("%s", why)
        self.close()
        return Outcome(attempt=0, exit_code=exit_code, reason=reason, message=why)

    async def _answer_ready(self, _: web.Request) -> web.Response:
        if self._state.description is not None:
            return web.Response(text="ready")
        return web.Response(status=503, text=self._state.away)

    async def _answer_describe(self, _: web.Request) -> web.Response:
        return web.Response(text=self._state.model_dump_json(), content_type="application/json")

    async def _serve_session(self, request: web.Request) -> web.WebSocketResponse:
        if not self._contract.is_local and _is_own(request):
            raise web.HTTPForbidden(text="sessions are for ranks: nothing that runs here may act in other episodes")
        socket = web.WebSocketResponse(
            heartbeat=messages.HEARTBEAT_SECONDS,
            max_msg_size=MAX_FRAME,
            compress=False,
            timeout=_CLOSE_SECONDS,
            autoclose=False,  # a rank that hears of its end may open another session
        )
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            await self._serve(socket)
        except InvalidMessageError as error:
            await _refuse(socket, error)
        except TimeoutError:
            logger.warning("%s connected, and asked for no session", request.remote)
        except ConnectionError as error:
            logger.info("%s went away: %s", request.remote, error)
        finally:
            self._sockets.discard(socket)
            await socket.close()
        return socket

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        async with asyncio.timeout(_OPEN_SECONDS):
            frame = await _receive(socket)
        if frame is None:
            return
        request, row = messages.unpack_request(frame)
        if not isinstance(request, Open):
            raise InvalidMessageError("a session is opened first")
        if (answer := self._turned_away(request)) is not None:
            await socket.send_bytes(messages.pack(answer))
            return
        assert self._processes is not None
        session = self._processes.begin(
            SessionRequest(
                environment=request.environment,
                row=row,
                seed=request.seed,
                wants_reward=request.wants_reward,
                wants_state=request.wants_state,
            )
        )
        assert isinstance(session, EpisodeSession), "no environment pods with programs: rules of the spec"
        self._num_open += 1
        try:
            await socket.send_bytes(messages.pack(Answer()))
            await _answer_all(socket, session)
        finally:
            await session.close()
            self._num_open -= 1

    def _turned_away(self, request: Open) -> Answer | None:
        """Return why no session is opened; None if one is."""
        if request.job != self._contract.job.uid:
            return Answer(away=f"is a pod of another job, {self._contract.job.namespace}/{self._contract.job.name}")
        if self._state.description is None:
            return Answer(away=self._state.away)
        if request.environment is not None and request.environment not in self._names:
            return Answer(away=f"has no environment {request.environment}")
        if self._num_open >= self._contract.sessions:
            return Answer(away=f"has {counted(self._num_open, 'session')}", is_full=True)
        return None

    async def _end_sessions(self, _: web.Application) -> None:
        self._state = State(away="is being stopped")
        ends = [socket.close(code=WSCloseCode.GOING_AWAY, message=b"is being stopped") for socket in self._sockets]
        await asyncio.gather(*ends, return_exceptions=True)


def _is_own(request: web.Request) -> bool:
    """Whether it comes from the pod itself: of what the model lets run there, for example."""
    assert request.transport is not None
    peer, own = (request.transport.get_extra_info(name) for name in ("peername", "sockname"))
    return bool(peer[0] == own[0])


async def _receive(socket: web.WebSocketResponse) -> bytes | None:
    """Return the next frame; None when the connection has ended. Raises InvalidMessageError."""
    message = await socket.receive()
    if message.type is WSMsgType.TEXT:
        raise InvalidMessageError("text")
    return message.data if message.type is WSMsgType.BINARY else None


async def _answer_all(socket: web.WebSocketResponse, session: Session) -> None:
    """Answer requests until the connection ends. It is read meanwhile: its end ends what a request does."""
    work: asyncio.Task[None] | None = None
    try:
        while (frame := await _receive(socket)) is not None:
            if work is not None:
                await work
            work = asyncio.ensure_future(_answer(socket, session, frame))
    finally:
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def _answer(socket: web.WebSocketResponse, session: Session, frame: bytes) -> None:
    try:
        for answer, behind in await _act(session, messages.unpack_request(frame)[0]):
            await socket.send_bytes(messages.pack(answer, behind))
    except ConnectionError:
        return  # nobody waits for it any more
    except InvalidMessageError as error:
        await _refuse(socket, error)
    except Exception:
        logger.exception("a session has failed")
        await socket.close(code=WSCloseCode.INTERNAL_ERROR)


async def _refuse(socket: web.WebSocketResponse, error: InvalidMessageError) -> None:
    logger.warning("a connection ends, as something came that is no request: %s", error)
    await socket.close(code=WSCloseCode.PROTOCOL_ERROR)


async def _act(session: Session, request: messages.Request) -> list[tuple[Answer, bytes]]:
    """Return the answers to a request, each with the bytes behind it."""
    try:
        if isinstance(request, Reset):
            return [(Answer(text=await session.reset()), b"")]
        if isinstance(request, Call):
            calls = [ToolCall(name=call.name, arguments=call.arguments) for call in request.calls]
            results = await session.call(calls, request.seconds)
            return [(Answer(text=one.content, is_failed=one.is_failed), b"") for one in results]
        if isinstance(request, End):
            reward, state = await session.end()
            return [(Answer(reward=reward, has_state=state is not None), state or b"")]
    except EnvironmentLostError as error:
        return [(Answer(error=str(error), cause=error.cause), b"")]
    except ConfigError as error:
        return [(Answer(refused=str(error)), b"")]
    except EpisodeTimeoutError:
        return [(Answer(is_over=True), b"")]
    raise InvalidMessageError("a session is opened once")
