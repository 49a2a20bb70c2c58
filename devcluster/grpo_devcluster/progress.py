"""One way to tell a person what is going on, and one way to wait for something with a deadline."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Report on standard error, so that what a command prints can be used by a script."""
    sys.stderr.write(f"devcluster: {text}\n")
    sys.stderr.flush()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Announce a step that takes a while, and tell how long it took."""
    start = time.monotonic()
    say(f"{what} ...")
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")


def wait_until(check: Callable[[], bool], what: str, timeout: float, interval: float = 0.1) -> None:
    """Poll `check` until it holds; a `TimeoutError` names what was waited for."""
    deadline = time.monotonic() + timeout
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(interval)
