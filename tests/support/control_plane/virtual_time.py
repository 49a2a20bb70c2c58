"""An event loop whose clock jumps: while every task waits, the time is at once that of the first timer.

Code that sleeps for an hour is tested in milliseconds, and its tasks take turns in the same order every time. Nothing
from outside can be awaited in it.
"""

import asyncio
import functools
import inspect
import selectors
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready: list[Any] = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for something that never happens")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` begins at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that runs in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_world(
    make: Callable[..., AbstractAsyncContextManager[Any]], *args: Any, **fields: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Let a test that is a coroutine function run in virtual time, in a new world that is its first argument."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def play(**fixtures: Any) -> None:
            async with make(*args, **fields) as world:
                await test(world, **fixtures)

        def run_play(**fixtures: Any) -> None:
            run(play(**fixtures))

        parameters = list(inspect.signature(test).parameters.values())
        run_play.__signature__ = inspect.Signature(parameters[1:])  # by which pytest finds fixtures
        return run_play

    return decorate


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let a test that is a coroutine function run in virtual time."""

    @functools.wraps(test)
    def play(*args: Any, **fixtures: Any) -> None:
        run(test(*args, **fixtures))

    return play
