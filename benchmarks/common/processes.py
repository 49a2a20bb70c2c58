"""Ends all processes that a benchmark has started: ranks and engines in their own sessions, and their children."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_PR_SET_CHILD_SUBREAPER = 36
GRACE = 30.0  # seconds for the kernel to end a killed process


@contextmanager
def ended_with() -> Iterator[None]:
    """Kill every process started inside the block that still runs, however the block ends; SIGTERM ends the block too.

    Raises:
        RuntimeError: the kernel has not ended a process 30 s after it was killed.
    """
    # Orphans become children of this process, not of init, where nothing would mark them as ours.
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
        return  # it has already ended
