"""Watches a transfer group's store, to abort a collective without a deadline when the group's server has left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

POLL = 1.0  # seconds between two checks of the store


@contextmanager
def abort_when_left(store: Any, abort: Callable[[], None], poll: float = POLL) -> Iterator[None]:
    """Call `abort` on a thread as soon as the process that serves `store` has closed it.

    Args:
        store: client of a TCPStore. The sender serves it, and closes it when it gives up its group or ends.
        abort: ends the collective that the block waits in.
        poll: seconds between two checks of the store.

    Raises:
        RuntimeError: the store was closed, however the block ended.
    """
    done, left = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(poll):
            try:
                store.check(["any"])
            except RuntimeError:  # the connection is gone
                left.set()
                abort()
                return

    watcher = threading.Thread(target=watch, name="store-watch", daemon=True)
    watcher.start()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        done.set()
        watcher.join()
    if left.is_set():
        raise RuntimeError("the trainer has left the transfer group in the middle of an update") from failure
    if failure is not None:
        raise failure
