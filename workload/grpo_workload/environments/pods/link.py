"""A rank's connection to an environment pod, for one session. What comes from there may be anything, and is checked."""

from __future__ import annotations

import asyncio

import aiohttp

from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import CAUSES, EnvironmentLostError, EpisodeTimeoutError
from grpo_workload.environments.pods import messages
from grpo_workload.environments.pods.messages import (
    MAX_FRAME,
    SESSION_PATH,
    Answer,
    Call,
    End,
    InvalidMessageError,
    Open,
    Reset,
)

CONNECT_SECONDS = 10.0
"""Time for a pod to open a session, and"""
_BYTES_A_SECOND = 1e6  # longer, the more bytes the row has
_CLOSE_SECONDS = 2.0


class LinkLostError(Exception):
    """The connection failed, or what came over it is no answer. The message completes "it"."""


class AwayError(Exception):
    """The pod opens no session now; the message says why."""

    def __init__(self, why: str, *, is_full: bool) -> None:
        super().__init__(why)
        self.is_full = is_full


class Link:
    """An open session. One coroutine at a time asks."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Read from a connection: in a task of its own, which answers pings while nobody asks."""
        self._socket = socket
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(1)  # a pod that sends more than was asked for is not read
        self._reader = asyncio.ensure_future(self._read())

    @staticmethod
    async def open(client: aiohttp.ClientSession, address: str, request: Open, row: bytes) -> Link:
        """Open a session.

        Raises:
            AwayError: the pod opens none now.
            LinkLostError: see there.
        """
        link, limit = None, CONNECT_SECONDS + len(row) / _BYTES_A_SECOND
        try:
            async with asyncio.timeout(limit):
                socket = await client.ws_connect(
                    f"http://{address}{SESSION_PATH}",
                    heartbeat=messages.HEARTBEAT_SECONDS,
                    max_msg_size=MAX_FRAME,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS),
                )
                link = Link(socket)
                answer, _ = await link._ask(messages.pack(request, row))
            if answer.away is not None:
                raise AwayError(answer.away, is_full=answer.is_full)
            return link
        except BaseException as error:
            if link is not None:
                await link.close()
            if isinstance(error, TimeoutError):
                raise LinkLostError(f"did not open a session within {limit:.1f} s") from error
            if isinstance(error, aiohttp.ClientError | OSError):
                raise LinkLostError(f"cannot be reached: {_text(error)}") from error
            raise

    async def ask(self, request: Reset | Call | End, count: int, seconds: float) -> list[tuple[Answer, bytes]]:
        """Return `count` answers, each with the bytes behind it.

        Raises:
            LinkLostError: see there, or no answer comes within the seconds.
            EnvironmentLostError, ConfigError, EpisodeTimeoutError: what a session in the pod has raised.
        """
        try:
            async with asyncio.timeout(seconds):
                found = [await self._ask(messages.pack(request))]
                while len(found) < count:
                    _raise_failure(found[-1][0])
                    found.append(await self._next())
        except TimeoutError as error:
            raise LinkLostError(f"did not answer within {seconds:g} s") from error
        _raise_failure(found[-1][0])
        return found

    async def close(self) -> None:
        """Close the connection, and wait until the pod has ended the session."""
        try:
            await self._socket.close()
        finally:  # not before: aiohttp waits for no answer after a read that was cancelled
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _ask(self, frame: bytes) -> tuple[Answer, bytes]:
        if not self._frames.empty():
            raise LinkLostError("sent what nobody asked for")
        if self._reader.done():
            raise LinkLostError(self._reader.result())
        try:
            await self._socket.send_bytes(frame)
        except (aiohttp.ClientError, OSError) as error:
            raise LinkLostError(f"broke the connection: {_text(error)}") from error
        return await self._next()

    async def _next(self) -> tuple[Answer, bytes]:
        getting = asyncio.ensure_future(self._frames.get())
        try:
            await asyncio.wait([getting, self._reader], return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                raise LinkLostError(self._reader.result())
            return messages.unpack_answer(getting.result())
        except InvalidMessageError as error:
            raise LinkLostError(f"sent something that is no answer: {error}") from error
        finally:
            getting.cancel()

    async def _read(self) -> str:
        """Read until the connection is lost; returns how."""
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                await self._frames.put(message.data)
            elif message.type is aiohttp.WSMsgType.ERROR:
                return f"broke the connection: {_text(message.data)}"
            elif message.type is aiohttp.WSMsgType.TEXT:
                return "sent something that is no answer: text"
            else:
                code = self._socket.close_code
                return "ended the connection" + ("" if code in (None, aiohttp.WSCloseCode.OK) else f" (code {code})")


def _raise_failure(answer: Answer) -> None:
    if answer.error is not None:
        cause = answer.cause if answer.cause in CAUSES else CAUSES[1]
        raise EnvironmentLostError(cause, answer.error)
    if answer.refused is not None:
        raise ConfigError(answer.refused)
    if answer.is_over:
        raise EpisodeTimeoutError


def _text(error: object) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
