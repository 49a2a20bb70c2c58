"""Nothing that a benchmark starts outlives it: neither ranks and engines in sessions of their own, nor what they started."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_PR_SET_CHILD_SUBREAPER = 36
GRACE = 30.0  # seconds until the kernel has ended a process that was killed


@contextmanager
def ended_with() -> Iterator[None]:
    """Kill what was started within and still runs, however this block ends; SIGTERM ends it, too.

    Raises:
        RuntimeError: the kernel has not ended a process 30 s after it was killed.
    """
    # What a process leaves behind becomes a child of this one, and not of init, where it could not be told from others.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    before = set(psutil.Process().children(recursive=True))
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        while left := [child for child in psutil.Process().children(recursive=True) if child not in before]:
            for child in left:
                _kill(child)
            _, alive = psutil.wait_procs(left, timeout=GRACE)
            if alive:
                raise RuntimeError(f"killed, and still there: {', '.join(map(str, alive))}")
        signal.signal(signal.SIGTERM, handler)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return  # it ended by itself
