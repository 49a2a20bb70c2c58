"""Messages about progress, and waiting with a deadline."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Write a message to standard error; standard output is for scripts."""
    sys.stderr.write(f"devcluster: {text}\n")
    sys.stderr.flush()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Announce a step, and say afterwards how long it took."""
    start = time.monotonic()
    say(f"{what} ...")
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")


def wait_until(check: Callable[[], bool], what: str, timeout: float, interval: float = 0.1) -> None:
    """Poll `check` until it is true. Raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + timeout
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(interval)
