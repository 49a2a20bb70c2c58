"""The rank's end of a child's socket. Users' code can write to the other end, so all is checked."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from grpo_workload.environments.base import CAUSES
from grpo_workload.environments.requests import MAX_STATE, Finish, Fork, Invoke, Kill, Play, Reset
from grpo_workload.environments.user_worker import LENGTH

_MAX_LINE = 16 << 20  # bytes: more than the longest result takes as JSON
_CHUNK = 1 << 18


class InvalidReplyError(Exception):
    """A process sent something that is no reply."""


class Reply(BaseModel):
    """One reply of a child, or the last line of its socket, which its zygote writes."""

    model_config = ConfigDict(strict=True)
    number: int  # of the request; 0: the first line and the last
    text: str = ""  # result of a call; what reset returned
    is_failed: bool = False  # the call is the policy's own failure
    reward: FiniteFloat | None = None
    state_bytes: int = Field(0, ge=0, le=MAX_STATE + (1 << 20))
    left_out: dict[str, str] = {}  # attributes that are not in the state, and why
    schemas: list[dict[str, Any]] = []
    has_reward: bool = False
    isolated: bool = True
    error: str | None = None  # the environment failed
    cause: str = CAUSES[1]
    refused: str | None = None  # a user's mistake
    ended: str | None = None  # how the process ended
    stack: str = ""  # where it was then, to append to a message


def pickled(request: Reset | Invoke | Finish | Play) -> bytes:
    """Return a request to a child as it is sent."""
    message = pickle.dumps(request)
    return LENGTH.pack(len(message)) + message


class Channel:
    """A child's socket, used in one event loop at a time, by one coroutine at a time."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the rank's end."""
        connection.setblocking(False)
        self._socket, self._buffer = connection, bytearray()
        self._number = 0

    async def ask(self, message: bytes) -> tuple[Reply, bytes]:
        """Send a request, and return the reply with the bytes behind it.

        Raises:
            InvalidReplyError: something else came.
            EOFError, OSError: the process is away.
        """
        self._number += 1
        await asyncio.get_running_loop().sock_sendall(self._socket, message)
        reply = await self.read()
        if reply.ended is None and reply.number != self._number:
            raise InvalidReplyError
        return reply, await self._exactly(reply.state_bytes)

    async def read(self) -> Reply:
        """Return the next reply. Raises as `ask`."""
        searched = 0
        while True:
            if (end := self._buffer.find(b"\n", searched)) >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                searched = 0
                if line:  # the last line begins with an empty one, in case that another was not complete
                    return _parsed(line)
                continue
            searched = len(self._buffer)
            if searched > _MAX_LINE:
                raise InvalidReplyError
            await self._more()

    async def last(self) -> Reply:
        """Return the last line, whatever comes before; empty if the socket closes without one."""
        while True:
            try:
                reply = await self.read()
            except InvalidReplyError:
                if len(self._buffer) > _MAX_LINE:
                    self._buffer.clear()
                continue
            except (EOFError, OSError):
                return Reply(number=0)
            if reply.ended is not None:
                return reply

    def is_quiet(self) -> bool:
        """Whether the process is there, and has sent nothing that nobody asked for."""
        return not self._buffer and is_quiet(self._socket)

    def close(self) -> None:
        """Close the socket; a child that waits for a request ends."""
        self._socket.close()

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    async def _more(self) -> None:
        if not (part := await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK)):
            raise EOFError
        self._buffer += part


def is_quiet(connection: socket.socket) -> bool:
    """Whether the other end of a socket that does not block is open, and has sent nothing that was not read."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def send(control: socket.socket, request: Fork | Kill, theirs: socket.socket | None = None) -> None:
    """Send a request to a zygote, which reads at once; OSError if it is away."""
    message = pickle.dumps(request)
    descriptors = [theirs.fileno()] if theirs else []
    socket.send_fds(control, [LENGTH.pack(len(message)) + message], descriptors)


def _parsed(line: bytes) -> Reply:
    try:
        return Reply.model_validate(json.loads(line))
    except (ValueError, ValidationError, RecursionError) as error:
        raise InvalidReplyError from error
