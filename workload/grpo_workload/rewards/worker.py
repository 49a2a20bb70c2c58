"""The process in which a reward function runs, started by `process`. Its imports are few: they count as its memory.

`environments.user_worker` says what it shares with the processes of tools and environments.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from grpo_spec.errors import ConfigError
from grpo_workload.data.user_code import import_function
from grpo_workload.environments import sandbox
from grpo_workload.environments.state import rebuild
from grpo_workload.environments.user_worker import (
    MAX_TEXT,
    awaited,
    enter,
    is_memory,
    message_of,
    place_of,
    receive,
    reply,
    seed_all,
)
from grpo_workload.rewards.trl_signature import (
    ENVIRONMENTS,
    Logged,
    ReturnedError,
    as_values,
    misfit,
    names_environments,
)


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
    """Answer requests until the rank closes the socket; the arguments are those of `user_worker.enter`."""
    stream = enter(replies, stacks, parent).makefile("rwb")
    orders = pickle.loads(receive(stream))
    assert isinstance(orders, Orders)
    isolated = sandbox.isolate()
    sandbox.limit_memory(orders.memory_bytes)
    try:
        function = _find(orders)
    except ValueError as error:
        reply(stream, {"error": _message(error, orders), "memory": isinstance(error.__cause__, MemoryError)})
        return
    reply(stream, {"isolated": isolated})
    params = {} if orders.is_factory else orders.params
    # One event loop for all steps, so that async functions can keep connections open.
    with asyncio.Runner() as event_loop, suppress(EOFError):
        while True:
            reply(stream, _answer(function, params, orders, event_loop, receive(stream)))


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
        raise ConfigError(f"{where} with {names} raised {type(error).__name__}: {error}{place_of(error)}") from error
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
        if is_memory(error):
            return {"error": f"ran out of memory{place_of(error)}", "memory": True}
        return {"error": f"raised {type(error).__name__}: {_message(error, orders)}{place_of(error)}"}


def _misfit(function: Callable[..., Any], params: Mapping[str, Any], request: Check, orders: Orders) -> str | None:
    why = misfit(function, params, request.columns, has_environments=request.has_environments)
    return why and (
        f"{orders.field}: {orders.path} does not take the arguments of its calls: {why}. Write `def "
        f"{getattr(function, '__name__', 'f')}(prompts, completions, **columns)`, and name only those that are there"
    )


def _call(
    function: Callable[..., Any], params: Mapping[str, Any], request: Call, event_loop: asyncio.Runner
) -> dict[str, Any]:
    seed_all(request.seed)
    logged = Logged(len(request.arguments["completions"]))
    own: dict[str, Any] = {"log_metric": logged.log_metric, "log_extra": logged.log_extra}
    if request.states is not None:
        own[ENVIRONMENTS] = [None if state is None else rebuild(state) for state in request.states]
    result = function(**{**params, **request.arguments, **own})
    if inspect.isawaitable(result):
        result = event_loop.run(awaited(result))
    return {"values": as_values(result, logged.count), "metrics": logged.metrics, "extra": logged.extra}


def _message(error: BaseException, orders: Orders) -> str:
    return message_of(error, orders.withheld, "the reward's")
