"""Messages between a rank and an environment pod, over one WebSocket for each session.

A frame is a message in JSON, and bytes behind it: a row on the way to a pod, the state of an environment on the way
back. Neither side unpickles these. The rank asks, one request at a time; a pod gives one answer to each, and to a
request for calls one for each call.
"""

from __future__ import annotations

import json
import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from grpo_workload.environments.base import CAUSES, Description
from grpo_workload.environments.requests import MAX_STATE

HEARTBEAT_SECONDS = 30.0
"""Seconds of silence after which a side pings the other, which then has half as long to answer."""
MAX_BEHIND = MAX_STATE + (1 << 20)
"""Most bytes behind a message."""
MAX_FRAME = MAX_BEHIND + (16 << 20)
"""Most bytes of a frame: the longest result takes less as JSON than is left for it."""
SESSION_PATH, READY_PATH, DESCRIBE_PATH = "/session", "/ready", "/describe"
_SIZE = struct.Struct(">I")


class InvalidMessageError(Exception):
    """The frame is no message."""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)


class Open(_Message):
    """The first request; behind it comes the row. Its fields are those of `base.SessionRequest`."""

    do: Literal["open"] = "open"
    job: str  # UID
    environment: str | None
    seed: int
    wants_reward: bool
    wants_state: bool


class Reset(_Message):
    """A request to begin the episode."""

    do: Literal["reset"] = "reset"


class OneCall(_Message):
    """A call, as `base.ToolCall`."""

    name: str
    arguments: dict[str, Any] | None


class Call(_Message):
    """A request to make the calls of a turn."""

    do: Literal["call"] = "call"
    calls: list[OneCall]
    seconds: FiniteFloat


class End(_Message):
    """A request for reward and state."""

    do: Literal["end"] = "end"


Request = Annotated[Open | Reset | Call | End, Field(discriminator="do")]
_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)


class Answer(_Message):
    """An answer to any request. After one that is a failure the session is of no use any more."""

    text: str = ""  # what reset returned; a call's result
    is_failed: bool = False  # the call is the policy's own failure
    reward: FiniteFloat | None = None
    has_state: bool = False  # it is behind this
    error: str | None = None  # the environment failed
    cause: str = CAUSES[1]
    refused: str | None = None  # a user's mistake
    is_over: bool = False  # the seconds of the episode are
    away: str | None = None  # why the pod opens no session now
    is_full: bool = False  # that is since all sessions are taken


class State(_Message):
    """Answer of GET /describe."""

    description: Description | None = None  # once it is ready
    refused: str | None = None  # a user's mistake, for which it never will be
    away: str = ""  # why it is not ready yet


def pack(message: BaseModel, behind: bytes = b"") -> bytes:
    """Return a frame."""
    content = json.dumps(message.model_dump()).encode()
    return _SIZE.pack(len(content)) + content + behind


def unpack_request(frame: bytes) -> tuple[Open | Reset | Call | End, bytes]:
    """Return a request, and the bytes behind it. Raises InvalidMessageError."""
    content, behind = _split(frame)
    try:
        return _REQUEST.validate_python(content), behind
    except ValueError as error:
        raise InvalidMessageError(_first_line(error)) from error


def unpack_answer(frame: bytes) -> tuple[Answer, bytes]:
    """Return an answer, and the bytes behind it. Raises InvalidMessageError."""
    content, behind = _split(frame)
    try:
        return Answer.model_validate(content), behind
    except ValueError as error:
        raise InvalidMessageError(_first_line(error)) from error


def _split(frame: bytes) -> tuple[Any, bytes]:
    end = _SIZE.size + (_SIZE.unpack_from(frame)[0] if len(frame) >= _SIZE.size else 0)
    if not _SIZE.size < end <= len(frame):
        raise InvalidMessageError(f"a frame of {len(frame)} bytes that does not hold its message")
    try:
        return json.loads(frame[_SIZE.size : end]), frame[end:]
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(f"no JSON ({type(error).__name__})") from error


def _first_line(error: ValueError) -> str:
    return " ".join(str(error).split())[:200]
