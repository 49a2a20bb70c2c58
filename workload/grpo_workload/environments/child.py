"""A child of a zygote: calls a user's tool, holds one environment, or runs a program, until the rank closes its socket.

Each reply repeats the number of its request: a line that users' code wrote to the socket does not pass for one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_workload.environments.description import has_method, methods_of, schemas_of
from grpo_workload.environments.requests import LOOPBACK, Endpoint, Finish, Fork, Invoke, Orders, Play, Reset
from grpo_workload.environments.results import (
    ImageResultError,
    ResultError,
    as_error,
    as_reward,
    as_text,
    is_connection,
)
from grpo_workload.environments.state import snapshot
from grpo_workload.environments.user_worker import (
    awaited,
    is_memory,
    message_of,
    place_of,
    receive,
    reply,
    seed_all,
)

_RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions of users' code. KeyboardInterrupt is a signal's, and ends the process."""


def serve(
    connection: socket.socket, function: Callable[..., Any], orders: Orders, request: Fork, isolated: bool
) -> None:
    """Answer requests until the rank closes the socket."""
    stream = connection.makefile("rwb")
    # One event loop for all episodes, so that async functions can keep connections open.
    with asyncio.Runner() as loop, suppress(EOFError):
        try:
            tools = _Tools(function, orders, loop, request.number)
            hello = {**tools.describe(), "isolated": isolated} if request.describes else {}
        except ConfigError as error:
            reply(stream, {"number": 0, "refused": str(error)})
            return
        except _RAISED as error:
            named = ", ".join(orders.params) or "no params"
            what = f"{orders.path} with {named} {tools_error(error, orders)}"
            reply(stream, {"number": 0, "error": what, "cause": "connection" if is_connection(error) else "reset"})
            return
        reply(stream, {"number": 0, **hello})
        number = 0
        while True:
            message = receive(stream)
            number += 1
            content, state = tools.answer(message)
            reply(stream, {"number": number, **content})
            stream.write(state)
            stream.flush()


def tools_error(error: BaseException, orders: Orders) -> str:
    """Say for people what users' code raised, and where."""
    if is_memory(error):
        text = f"ran out of memory{place_of(error)}; its memoryLimit is {orders.memory_limit}"
        return f"{text}: raise it, or use less memory at a time"
    return f"raised {type(error).__name__}: {message_of(error, orders.withheld, orders.whose)}{place_of(error)}"


class _MisfitError(Exception):
    """A user's method does not take the arguments of its call."""


class _Tools:
    """A function, an environment with its methods, or a program."""

    def __init__(self, function: Callable[..., Any], orders: Orders, loop: asyncio.Runner, number: int) -> None:
        self._orders, self._loop, self._instance = orders, loop, None
        self._function = function
        if orders.kind != "factory":
            self._tools = _by_own_name([function] if orders.kind == "function" else [])
            if orders.kind == "program":
                _check_program(function, orders)
            return
        seed_all(number)  # numpy's would be the same in all children
        self._instance = self._run(function, dict(orders.params))
        self._tools = _by_own_name(methods_of(self._instance))
        if not has_method(self._instance, "reset"):
            raise ConfigError(
                f"{orders.field}: {orders.path} makes a {type(self._instance).__name__}, which has no method reset; "
                "write `def reset(self, **row)`, which begins an episode and returns text for the model, or None"
            )

    def describe(self) -> dict[str, Any]:
        scores = self._instance is not None and has_method(self._instance, "get_reward")
        has_reward = scores or self._orders.kind == "program"
        return {"schemas": schemas_of(self._orders.field, self._tools.values()), "has_reward": has_reward}

    def answer(self, message: bytes) -> tuple[dict[str, Any], bytes]:
        """Return a reply, and the bytes behind it."""
        where = "its request"  # which loads classes of users that the columns of a row may have
        try:
            request = pickle.loads(message)
            if isinstance(request, Invoke):
                where = request.name
                return self._invoke(request), b""
            if isinstance(request, Play):
                where = "program"
                return {"reward": self._play(request)}, b""
            if isinstance(request, Reset):
                row = pickle.loads(request.row)
                where = "reset"
                seed_all(request.seed)
                return {"text": self._observation(row)}, b""
            assert isinstance(request, Finish)
            where = "get_reward"
            return self._finish(request)
        except ImageResultError:
            return {"refused": f"{self._orders.field}: {where} returned an image; only text can be read yet"}, b""
        except _MisfitError as error:
            return {"refused": f"{self._orders.field}: {error}"}, b""
        except _RAISED as error:
            own = where if where in ("get_reward", "program") else "reset"
            cause = "connection" if is_connection(error) else own
            what = str(error) if isinstance(error, ResultError) else tools_error(error, self._orders)
            who = self._orders.path if where == "program" else where
            return {"error": f"{who} {what}", "cause": cause}, b""

    def _invoke(self, request: Invoke) -> dict[str, Any]:
        if request.seed is not None:
            seed_all(request.seed)
        try:
            return {"text": as_text(self._run(self._tools[request.name], dict(request.arguments)))}
        except ImageResultError:
            raise
        except _RAISED as error:
            if is_connection(error):
                raise
            return {"text": as_error(str(error) or type(error).__name__), "is_failed": True}

    def _observation(self, row: dict[str, Any]) -> str:
        reset = self._method("reset")
        _check_arguments(reset, row)
        result = self._run(reset, row)
        if not (result is None or isinstance(result, str | list)):
            as_text(result)  # an image has a message of its own
            raise ResultError(f"returned a {type(result).__name__}; return text, or None")
        return "" if result is None else as_text(result)

    def _finish(self, request: Finish) -> tuple[dict[str, Any], bytes]:
        reward = as_reward(self._run(self._method("get_reward"), {})) if request.wants_reward else None
        state, left_out = snapshot(self._instance) if request.wants_state else (b"", {})
        return {"reward": reward, "state_bytes": len(state), "left_out": left_out}, state

    def _play(self, request: Play) -> float | None:
        row = pickle.loads(request.row)
        seed_all(request.seed)
        end = request.endpoint
        # What the openai package reads, and most that is built on it; the user may have passed on an account.
        own = {"OPENAI_BASE_URL": end.base_url, "OPENAI_API_KEY": end.api_key}
        os.environ |= {} if own.keys() & os.environ.keys() else own
        os.environ |= {name: f"{LOOPBACK},{os.environ.get(name, '')}" for name in ("NO_PROXY", "no_proxy")}
        returned = self._run(self._function, {"row": row} | _arguments(end))
        return None if returned is None else as_reward(returned)

    def _method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._instance, name)
        return method

    def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        result = function(**arguments)
        return self._loop.run(awaited(result)) if inspect.isawaitable(result) else result


def _arguments(endpoint: Endpoint) -> dict[str, Any]:
    return {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}


def _check_program(function: Callable[..., Any], orders: Orders) -> None:
    """Raise ConfigError if a program does not take the arguments of its calls."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(
            row={}, **_arguments(Endpoint(base_url="", api_key="", model=""))
        )
    except TypeError as error:
        raise ConfigError(
            f"{orders.field}: {orders.path} does not take the arguments of its calls: {error}. Write `def play(row, *, "
            "base_url, api_key, model)`"
        ) from error
    except ValueError:  # of C
        return


def _check_arguments(reset: Callable[..., Any], row: Mapping[str, Any]) -> None:
    """Raise _MisfitError if `reset` cannot be called with the columns of a row: no row would do."""
    try:
        # Not of what a decorator wraps: it may pass on other arguments than it takes.
        signature = inspect.signature(reset, follow_wrapped=False)
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(**row)
    except TypeError as error:
        raise _MisfitError(
            f"reset cannot be called with a row of the dataset: {error}. A row has {', '.join(row)}; write "
            "`def reset(self, **row)`, and name only columns that are there"
        ) from error


def _by_own_name(tools: Iterable[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return tools by the names in their schemas, which a decorator may have changed."""
    return {getattr(tool, "__name__", "operation"): tool for tool in tools}
