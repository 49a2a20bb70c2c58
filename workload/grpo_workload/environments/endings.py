"""Messages about a process with users' code that ended: its end, and the place where its code was."""

from __future__ import annotations

import re
import selectors
import signal

DYING_SECONDS = 2.0
"""Time for a process to end after it has closed its socket, or got a signal."""
_STACK_LINES = 8
_CALLERS = ('"<', "/grpo_workload/", "/asyncio/", "/importlib/", selectors.__file__)
"""Parts of the names of files that call users' code or wait for it, and say nothing to users."""


def how_it_ended(code: int, memory_limit: str) -> str:
    """Describe the exit code of a process, negative for a signal; completes "its process"."""
    if code == -signal.SIGKILL:
        hint = "probably the pod ran out of memory: raise podTemplate.resources.limits.memory"
        return f"was killed by SIGKILL ({hint})"
    if code < 0:
        hint = f"a library that cannot get memory also ends this way: memoryLimit is {memory_limit}"
        return f"was killed by {signal.Signals(-code).name} ({hint})"
    return f"ended with exit code {code}"


def last_stack(dump: bytes) -> str:
    """Return the main thread's stack in what faulthandler wrote, to append to a message; empty if there is none.

    The user's own function is on the message's first line, which statuses show; what it has called is below.
    """
    own = re.search(r"^Current thread .*\n((?:  File .*\n?)+)", dump.decode(errors="replace"), re.MULTILINE)
    frames = [line for line in own[1].splitlines() if not any(part in line for part in _CALLERS)] if own else []
    if not frames:
        return ""
    where = re.sub(r' *File "(.*)", line (\d+) in (.*)', r"; it was in \3 (\1:\2)", frames[-1])
    return "\n".join([where, *frames[:-1][:_STACK_LINES]])
