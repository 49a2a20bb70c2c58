"""Starts the ranks of a benchmark, and ends all processes that it has started: in their own sessions, and children."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from grpo_cli.local.processes import free_ports

_PR_SET_CHILD_SUBREAPER = 36
GRACE = 30.0  # seconds for the kernel to end a killed process
DRIVER = 120.0  # more seconds for the driver to free its GPU's memory, which what runs next would lack


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
            _, late = psutil.wait_procs(left, timeout=GRACE)
            if alive := [child for child in late if _status(child) != psutil.STATUS_ZOMBIE]:
                raise RuntimeError(f"killed, and still there: {', '.join(map(str, alive))}")
            psutil.wait_procs(late, timeout=DRIVER)
            before.update(late)
        signal.signal(signal.SIGTERM, handler)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return  # it has already ended


def run_ranks(module: str, count: int, options: list[str], folder: Path, seconds: int) -> str | None:
    """Run a module as `count` ranks; return the end of the first log of a rank that failed, if one did."""
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_PORT": str(port)}
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    started = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", module, *options]
        started.append(subprocess.Popen(command, env=os.environ | world | own, stderr=log.open("w")))
    deadline = time.monotonic() + seconds
    codes: list[int | None] = [None] * count
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.2)
        codes = [one.poll() for one in started]
    failed = next((rank for rank, code in enumerate(codes) if code), None if None not in codes else 0)
    for one in started:  # of a rank that failed, the others wait for ever
        one.kill()
        one.wait()
    if failed is None:
        return None
    said, code = logs[failed].read_text().strip()[-1500:], codes[failed]
    why = f"rank {failed} ended with {code}" if code else f"no end after {seconds} s"
    return said if code and said else f"{said}\n{why}".strip()
