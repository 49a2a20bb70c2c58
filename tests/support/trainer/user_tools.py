"""Tools and environments of a user, as `module:function` names them: good ones, and each way in which one can fail."""

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np


class OurServiceError(Exception):
    """An error of a user's that says what it is."""

    is_infrastructure = True


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    print("a line that the tool prints")  # noqa: T201
    return a * b


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0)
    if a < 0:
        raise ValueError("a must not be negative")
    return a + b


def fail(how: str) -> object:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "raises":
        raise KeyError("colour")
    if how == "hangs":
        while True:
            time.sleep(600)
    if how == "connection":
        raise ConnectionResetError("the database is away")
    if how == "timeout":
        raise TimeoutError("the database is slow")
    if how == "named":
        raise type("APIConnectionError", (Exception,), {})("the service is away")
    if how == "marked":
        raise OurServiceError("the service is down")
    if how == "exits":
        sys.exit("bye")
    if how == "leaves":
        os._exit(3)
    if how == "crashes":
        ctypes.string_at(0)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        return str(bytearray(1 << 30))
    if how == "nonsense":
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, b"nonsense\n")
    if how == "forged":
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, b'{"number": 99, "text": "forged"}\n')
    if how == "image":
        from PIL import Image

        return Image.new("RGB", (1, 1))
    return how


def give(kind: str) -> object:
    """Return something.

    Args:
        kind: What.
    """
    found = {
        "none": None,
        "dict": {"a": 1},
        "list": [1, "two"],
        "blocks": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
        "surrogate": "cut \ud83d",
        "big": "x" * ((1 << 20) + 5),
        "huge": lambda: "é" * 10_000_000,
        "numbers": f"{random.random()} {np.random.random()}",
        "variables": sorted(os.environ),
        "pid": os.getpid(),
    }[kind]
    return found() if callable(found) else found


def meet(folder: str, name: str, other: str) -> str:
    """Wait until another call runs.

    Args:
        folder: Where both write.
        name: Of this call.
        other: Of the other call.
    """
    open(f"{folder}/{name}", "w").close()
    while not os.path.exists(f"{folder}/{other}"):
        time.sleep(0.01)
    return "met"


def renamed(function: Callable[..., str]) -> Callable[..., str]:
    """Return a function with a name and a docstring of its own, as decorators do."""

    def look_around(self) -> str:
        """Look around."""
        return function(self)

    return look_around


def bare(a, b):
    return a + b


class Counter:
    """A state that is kept over calls."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.lock = start, threading.Lock()
        self.numbers: list[int] = []
        self.row: dict[str, object] = {}

    @property
    def evaluated(self) -> int:
        raise AssertionError("nobody reads it")

    def reset(self, **row: object) -> str | None:
        self.row, self.numbers = row, [self.start]
        if row.get("how") == "raises":
            raise ValueError("no such level")
        if row.get("how") == "away":
            raise ConnectionError("the game's server is away")
        if row.get("how") == "number":
            return 3
        return None if row.get("how") == "silent" else f"Count on from {self.start}, {random.randrange(10**9)}."

    def append(self, number: int) -> str:
        """Append a number.

        Args:
            number: The next number.
        """
        self.numbers.append(number)
        return f"{self.numbers}"

    async def total(self) -> int:
        """Return the sum."""
        await asyncio.sleep(0)
        return sum(self.numbers)

    def pid(self) -> int:
        """Return the number of its process."""
        return os.getpid()

    def hang(self, folder: str) -> None:
        """Start another process, and hang.

        Args:
            folder: Where the numbers of both processes are written.
        """
        other = subprocess.Popen(["sleep", "600"])
        with open(f"{folder}/new", "w") as file:
            file.write(f"{os.getpid()} {other.pid}")
        os.rename(f"{folder}/new", f"{folder}/pids")
        time.sleep(600)

    def roll(self) -> int:
        """Roll a die with many faces."""
        return random.randrange(10**9)

    def _hidden(self) -> None:
        pass

    def get_reward(self) -> float:
        if self.row.get("how") == "bad":
            return "good"
        if self.row.get("how") == "unfair":
            raise ZeroDivisionError("no numbers")
        return float(sum(self.numbers))


class AsyncCounter:
    """All of it async."""

    async def reset(self, **row: object) -> str:
        self.loop = asyncio.get_running_loop()
        return "begin"

    async def same_loop(self) -> bool:
        """Whether the event loop is that of reset."""
        return self.loop is asyncio.get_running_loop()

    async def get_reward(self) -> float:
        return 0.5


class Silent:
    """Has no reward."""

    def reset(self, **row: object) -> None:
        pass

    @renamed
    def look(self) -> str:
        """Look."""
        return "nothing"


class Endless:
    """Lacks reset."""

    def look(self) -> str:
        """Look."""
        return "nothing"


def refuses(start: int) -> None:
    raise ValueError(f"cannot begin at {start}")
