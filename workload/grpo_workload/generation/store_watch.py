"""A watch over the store of a transfer group, for those who wait in a collective that has no deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOOK = 1.0  # seconds between two looks


@contextmanager
def abort_when_left(store: Any, abort: Callable[[], None], look: float = LOOK) -> Iterator[None]:
    """Call `abort`, on a thread, as soon as the process that serves `store` has closed it.

    Args:
        store: a client of a TCPStore. Whoever sends serves it, and closes it when it gives its group up, or with its end.
        abort: ends what the block waits in.
        look: seconds between two looks.

    Raises:
        RuntimeError: the store was closed, whatever came out of the block.
    """
    done, left = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(look):
            try:
                store.check(["any"])
            except RuntimeError:  # its connection is gone
                left.set()
                abort()
                return

    watching = threading.Thread(target=watch, name="store-watch", daemon=True)
    watching.start()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        done.set()
        watching.join()
    if left.is_set():
        raise RuntimeError("the trainer has left the transfer group in the middle of an update") from failure
    if failure is not None:
        raise failure
