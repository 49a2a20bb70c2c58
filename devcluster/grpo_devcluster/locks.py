"""Calls that change the same folder wait for each other."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from grpo_devcluster.progress import say


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel frees it should this process die."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another call works on {folder}: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
