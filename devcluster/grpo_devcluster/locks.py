"""Calls that change the same folder wait for each other."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_devcluster.progress import say


@contextlib.contextmanager
def locked(folder: Path, describe: Callable[[], str] | None = None) -> Iterator[None]:
    """Hold the folder's lock. While another process holds it, say what `describe` returns each time that changes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        shown = ""
        while not _taken(lock.fileno()):  # the kernel frees the lock of a process that dies
            news = describe() if describe else f"waiting for another process that works on {folder}"
            if news != shown:
                say(shown := news)
            time.sleep(0.2)
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
