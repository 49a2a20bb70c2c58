"""Shared part of the processes with users' code, on their own side. Its imports are few: they count as their memory.

Requests from the rank are 8 bytes of length and a pickle. Replies are lines of JSON and never pickles, since a pickle
from here could run any code in the rank.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import random
import re
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Collection, Mapping
from io import BufferedRWPair
from typing import Any

from grpo_workload.environments import sandbox

LENGTH = struct.Struct(">Q")
MAX_TEXT = 2000
"""Letters of an exception that a reply tells."""
_OURS = os.path.dirname(os.path.dirname(__file__))


def enter(replies: int, stacks: int, parent: int | None) -> socket.socket:
    """Make this process ready for users' code, and return its socket to the rank.

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
    return socket.socket(fileno=replies)


def receive(stream: BufferedRWPair) -> bytes:
    """Return the next request. EOFError when the rank has closed the socket."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return stream.read(LENGTH.unpack(header)[0])


def reply(stream: BufferedRWPair, content: Mapping[str, Any]) -> None:
    """Send a reply."""
    stream.write(json.dumps(content).encode() + b"\n")
    stream.flush()


def seed_all(seed: int) -> None:
    """Seed the random numbers, 32 bits, of what users' code has imported."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


async def awaited(result: Awaitable[Any]) -> Any:
    """Await anything: event loops run coroutines only."""
    return await result


def is_memory(error: BaseException) -> bool:
    """Whether the process could not get memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torch_error = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torch_error


def message_of(error: BaseException, withheld: Collection[str], whose: str) -> str:
    """Return the error's text, with advice if it names a variable that only the rank has.

    Args:
        error: what was raised.
        withheld: names of the variables that the rank has and this process has not.
        whose: for example "the reward's".
    """
    text = str(error)[:MAX_TEXT]
    missing = next((name for name in withheld if re.search(rf"\b{re.escape(name)}\b", text)), None)
    return text if missing is None else f"{text}; {missing} is set in the pod; add it to {whose} `env` to pass it on"


def place_of(error: BaseException) -> str:
    """Return where in users' code the error was raised, to append to a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OURS + os.sep)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
