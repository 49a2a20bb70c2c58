"""The process in which a user's reward function runs, started by `reward_process`; light, for it has memory of its own to count.

Requests are frames of 8 bytes of length and a pickle, which the rank makes. Replies are lines of JSON: the rank reads nothing else of what
this process says, since a pickle from here could run anything there.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import inspect
import json
import os
import pickle
import re
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

from grpo_workload import sandbox
from grpo_workload.user_code import import_function

LENGTH = struct.Struct(">Q")
MAX_TEXT = 2000

Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The first request: what to run, and within which limits."""

    field: str  # as messages name it
    path: str  # module:function
    memory_bytes: int
    withheld: tuple[str, ...]  # names of variables that the rank has


def as_values(result: Any) -> Values:
    """A reward function's result as floats and None. ValueError when it is no list of these."""
    try:
        return [None if value is None else float(value) for value in result]
    except (TypeError, ValueError) as error:
        raise ValueError(f"must return a list of numbers or None, one a completion: {error}") from error


def main(replies: int, stacks: int, parent: int) -> None:
    """Serve `replies`, a socket's descriptor, until it is closed; where a signal ends this process, leave its stack in `stacks`."""
    sandbox.end_with_parent(parent)
    faulthandler.enable(file=stacks)
    for descriptor in (replies, stacks):
        os.set_inheritable(descriptor, False)  # a process that the function leaves behind would keep the rank waiting
    os.dup2(2, 1)
    stream = socket.socket(fileno=replies).makefile("rwb")
    orders = _read(stream)
    assert isinstance(orders, Orders)
    isolated = sandbox.isolate()
    sandbox.limit_memory(orders.memory_bytes)
    try:
        function = import_function(orders.field, orders.path)
    except ValueError as error:
        _reply(stream, {"error": _told(error, orders), "memory": isinstance(error.__cause__, MemoryError)})
        return
    _reply(stream, {"isolated": isolated})
    with asyncio.Runner() as event_loop, suppress(EOFError):  # one loop for all steps: async functions may keep connections
        while True:
            _reply(stream, _call(function, orders, event_loop, stream))


def _call(function: Callable[..., Any], orders: Orders, event_loop: asyncio.Runner, stream: BufferedRWPair) -> dict[str, Any]:
    try:
        result = function(**_read(stream))
        if inspect.isawaitable(result):
            result = event_loop.run(_awaited(result))
    except EOFError:
        raise
    except (Exception, SystemExit) as error:
        if _is_memory(error):
            return {"error": f"ran out of memory{_place(error)}", "memory": True}
        return {"error": f"raised {type(error).__name__}: {_told(error, orders)}{_place(error)}"}
    try:
        return {"values": as_values(result)}
    except ValueError as error:
        return {"error": str(error)[:MAX_TEXT]}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))  # torch's words


def _told(error: BaseException, orders: Orders) -> str:
    """The error's text, and what to do where a variable is missing that the rank has."""
    text = str(error)[:MAX_TEXT]
    missing = next((name for name in orders.withheld if re.search(rf"\b{re.escape(name)}\b", text)), None)
    return text if missing is None else f"{text}; {missing} is set in the pod, and rewards get it where their `env` names it"


def _place(error: BaseException) -> str:
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _read(stream: BufferedRWPair) -> Any:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(header)[0]))


def _reply(stream: BufferedRWPair, reply: dict[str, Any]) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()
