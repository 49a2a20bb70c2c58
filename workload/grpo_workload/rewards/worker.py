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
import random
import re
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any, cast

from grpo_spec.errors import ConfigError
from grpo_workload.data.user_code import import_function
from grpo_workload.rewards import sandbox
from grpo_workload.rewards.trl_signature import (
    ENVIRONMENTS,
    Logged,
    ReturnedError,
    as_values,
    misfit,
    names_environments,
)

LENGTH = struct.Struct(">Q")
MAX_TEXT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The first request: what to run, and within which limits."""

    field: str  # the field's name in messages
    path: str  # module:function
    params: Mapping[str, Any]  # keyword arguments
    is_factory: bool  # the function is called once, with `params`, and returns the one to run
    memory_bytes: int
    withheld: tuple[str, ...]  # names of variables that the rank has and this process has not


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A request to say why the function cannot be called with these columns, and whether it reads environments."""

    columns: tuple[str, ...]
    has_environments: bool  # whether the job has


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request to call the function."""

    arguments: Mapping[str, Any]  # see `trl_signature.trl_arguments`
    seed: int  # of Python's, numpy's and torch's random numbers, 32 bits
    states: Sequence[bytes | None] | None = None  # of the environments, for a function that reads them


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
    orders = pickle.loads(_receive(stream))
    assert isinstance(orders, Orders)
    isolated = sandbox.isolate()
    sandbox.limit_memory(orders.memory_bytes)
    try:
        function = _find(orders)
    except ValueError as error:
        _reply(stream, {"error": _message(error, orders), "memory": isinstance(error.__cause__, MemoryError)})
        return
    _reply(stream, {"isolated": isolated})
    params = {} if orders.is_factory else orders.params
    # One event loop for all steps, so that async functions can keep connections open.
    with asyncio.Runner() as event_loop, suppress(EOFError):
        while True:
            _reply(stream, _answer(function, params, orders, event_loop, _receive(stream)))


def _find(orders: Orders) -> Callable[..., Any]:
    """Return the function to run. Raises ConfigError if it cannot be imported, or if its factory fails."""
    function = import_function(orders.field, orders.path)
    if not orders.is_factory:
        return function
    where = f"{orders.field}: {orders.path}"
    try:
        made = function(**orders.params)
    except Exception as error:
        names = ", ".join(orders.params) or "no params"
        raise ConfigError(f"{where} with {names} raised {type(error).__name__}: {error}{_place(error)}") from error
    if not callable(made):
        raise ConfigError(f"{where} returned a {type(made).__name__}, not a function; a reward itself is a `function`")
    return cast(Callable[..., Any], made)


def _answer(
    function: Callable[..., Any], params: Mapping[str, Any], orders: Orders, event_loop: asyncio.Runner, message: bytes
) -> dict[str, Any]:
    try:
        request = pickle.loads(message)
        if isinstance(request, Check):
            names = request.has_environments and names_environments(function)
            return {"misfit": _misfit(function, params, request, orders), ENVIRONMENTS: names}
        return _call(function, params, request, event_loop)
    except ReturnedError as error:
        return {"returned": str(error)[:MAX_TEXT], "completion": error.completion}
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if _is_memory(error):
            return {"error": f"ran out of memory{_place(error)}", "memory": True}
        return {"error": f"raised {type(error).__name__}: {_message(error, orders)}{_place(error)}"}


def _misfit(function: Callable[..., Any], params: Mapping[str, Any], request: Check, orders: Orders) -> str | None:
    why = misfit(function, params, request.columns, has_environments=request.has_environments)
    return why and (
        f"{orders.field}: {orders.path} does not take the arguments of its calls: {why}. Write `def "
        f"{getattr(function, '__name__', 'f')}(prompts, completions, **columns)`, and name only those that are there"
    )


def _call(
    function: Callable[..., Any], params: Mapping[str, Any], request: Call, event_loop: asyncio.Runner
) -> dict[str, Any]:
    _seed(request.seed)
    logged = Logged(len(request.arguments["completions"]))
    own: dict[str, Any] = {"log_metric": logged.log_metric, "log_extra": logged.log_extra}
    if request.states is not None:
        own[ENVIRONMENTS] = [None if state is None else _rebuild(state) for state in request.states]
    result = function(**{**params, **request.arguments, **own})
    if inspect.isawaitable(result):
        result = event_loop.run(_awaited(result))
    return {"values": as_values(result, logged.count), "metrics": logged.metrics, "extra": logged.extra}


def _rebuild(state: bytes) -> object:
    """Return the environment that a process of the user's own code has pickled."""
    return pickle.loads(state)


def _seed(seed: int) -> None:
    """Seed the random numbers of what the function has imported."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


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


def _receive(stream: BufferedRWPair) -> bytes:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return stream.read(LENGTH.unpack(header)[0])


def _reply(stream: BufferedRWPair, reply: dict[str, Any]) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()
