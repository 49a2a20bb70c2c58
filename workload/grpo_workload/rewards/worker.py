"""The process in which a reward function runs, started by `process`. Its imports are few: they count as its memory.

Requests from the rank are 8 bytes of length and a pickle. Replies are lines of JSON and never pickles, since a pickle
from here could run any code in the rank.
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedRWPair
from typing import Any, cast

from grpo_workload.data.user_code import import_function
from grpo_workload.rewards import sandbox
from grpo_workload.rewards.trl_signature import Logged
from grpo_workload.spec.errors import ConfigError

LENGTH = struct.Struct(">Q")
MAX_TEXT = 2000

Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The first request: what to run, and within which limits."""

    field: str  # the field's name in messages
    path: str  # module:function
    params: Mapping[str, Any]  # keyword arguments
    is_factory: bool  # the function is called once, with `params`, and returns the one to run
    memory_bytes: int
    withheld: tuple[str, ...]  # names of variables that the rank has and this process has not


def as_values(result: Any) -> Values:
    """Convert a reward function's result to floats and None. Raises ValueError if it is not a list of these."""
    try:
        return [None if value is None else float(value) for value in result]
    except (TypeError, ValueError) as error:
        raise ValueError(f"must return a list of numbers or None, one per completion: {error}") from error


def main(replies: int, stacks: int, parent: int | None) -> None:
    """Answer requests until the rank closes the socket.

    Args:
        replies: the socket's descriptor.
        stacks: descriptor of a file that gets this process's stack if a signal ends it.
        parent: process id of the rank, if this process must end with the thread that started it.
    """
    if parent is not None:
        sandbox.end_with_parent(parent)
    faulthandler.enable(file=stacks)
    for descriptor in (replies, stacks):
        os.set_inheritable(descriptor, False)  # processes that the function starts must not keep the socket open
    os.dup2(2, 1)
    stream = socket.socket(fileno=replies).makefile("rwb")
    orders = _read(stream)
    assert isinstance(orders, Orders)
    isolated = sandbox.isolate()
    sandbox.limit_memory(orders.memory_bytes)
    try:
        function = _find(orders)
    except ValueError as error:
        _reply(stream, {"error": _message(error, orders), "memory": isinstance(error.__cause__, MemoryError)})
        return
    _reply(stream, {"isolated": isolated})
    # One event loop for all steps, so that async functions can keep connections open.
    with asyncio.Runner() as event_loop, suppress(EOFError):
        while True:
            _reply(stream, _call(function, orders, event_loop, stream))


def _find(orders: Orders) -> Callable[..., Any]:
    """Return the function to run. Raises ConfigError if it cannot be imported, or if its factory fails."""
    function = import_function(orders.field, orders.path)
    if not orders.is_factory:
        return partial(function, **orders.params)
    where = f"{orders.field}: {orders.path}"
    try:
        made = function(**orders.params)
    except Exception as error:
        names = ", ".join(orders.params) or "no params"
        raise ConfigError(f"{where} with {names} raised {type(error).__name__}: {error}{_place(error)}") from error
    if not callable(made):
        raise ConfigError(f"{where} returned a {type(made).__name__}, not a function; a reward itself is a `function`")
    return cast(Callable[..., Any], made)


def _call(
    function: Callable[..., Any], orders: Orders, event_loop: asyncio.Runner, stream: BufferedRWPair
) -> dict[str, Any]:
    try:
        arguments = _read(stream)
        logged = Logged(len(arguments["completions"]))
        result = function(**arguments, log_metric=logged.log_metric, log_extra=logged.log_extra)
        if inspect.isawaitable(result):
            result = event_loop.run(_awaited(result))
    except EOFError:
        raise
    except (Exception, SystemExit) as error:
        if _is_memory(error):
            return {"error": f"ran out of memory{_place(error)}", "memory": True}
        return {"error": f"raised {type(error).__name__}: {_message(error, orders)}{_place(error)}"}
    try:
        return {"values": as_values(result), "metrics": logged.metrics, "extra": logged.extra}
    except ValueError as error:
        return {"error": str(error)[:MAX_TEXT]}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torch_error = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torch_error


def _message(error: BaseException, orders: Orders) -> str:
    """Return the error's text, with advice if it names a variable that only the rank has."""
    text = str(error)[:MAX_TEXT]
    missing = next((name for name in orders.withheld if re.search(rf"\b{re.escape(name)}\b", text)), None)
    return (
        text if missing is None else f"{text}; {missing} is set in the pod; add it to the reward's `env` to pass it on"
    )


def _place(error: BaseException) -> str:
    """Return where in the function's code the error was raised, to append to a message."""
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) != os.path.dirname(__file__)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _read(stream: BufferedRWPair) -> Any:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(header)[0]))


def _reply(stream: BufferedRWPair, reply: dict[str, Any]) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()
