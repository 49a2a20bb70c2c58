"""Who waits in a collective is let out of it when the process that serves the group's store has left."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from launcher import free_ports

from grpo_workload.generation.store_watch import abort_when_left

LOOK = 0.02
DEADLINE = 30.0


def stores() -> tuple[Any, Any]:
    """The one who serves, and a client."""
    (port,) = free_ports(1)
    served = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    return served, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def wait_until_aborted(error: Exception | None) -> None:
    """Watch a store that is closed then, wait to be aborted, and end with `error` or as if nothing had happened."""
    served, store = stores()
    aborted = threading.Event()
    with abort_when_left(store, aborted.set, LOOK):
        del served
        assert aborted.wait(DEADLINE), "nobody aborted"
        if error is not None:
            raise error


def test_a_block_that_waits_is_aborted_when_the_store_is_closed() -> None:
    failed = OSError("the communicator is gone")
    with pytest.raises(RuntimeError, match="left the transfer group in the middle of an update") as caught:
        wait_until_aborted(failed)
    assert caught.value.__cause__ is failed


def test_what_an_aborted_block_ends_with_is_refused_too() -> None:
    """A broadcast that was aborted returns, and leaves garbage."""
    with pytest.raises(RuntimeError, match="left the transfer group"):
        wait_until_aborted(None)


def test_nothing_happens_while_the_store_is_there() -> None:
    served, store = stores()
    aborted = threading.Event()
    looked = threading.Event()

    class Seen:
        def __init__(self) -> None:
            self.looks = 0

        def check(self, keys: list[str]) -> bool:
            self.looks += 1
            if self.looks > 2:
                looked.set()
            return bool(store.check(keys))

    with abort_when_left(Seen(), aborted.set, LOOK):
        assert looked.wait(DEADLINE)
    with pytest.raises(KeyError, match="its own"), abort_when_left(store, aborted.set, LOOK):
        raise KeyError("its own")
    assert not aborted.is_set()
    served.set("still", "there")
