"""The watch over a group's store: a waiting collective is aborted when the process that serves the store has left."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from grpo_workload.generation.vllm_worker.store_watch import abort_when_left
from support.trainer.launchers import free_ports

POLL = 0.02
DEADLINE = 30.0


def stores():
    """Return a store that this process serves, and a client of it."""
    (port,), limits = free_ports(1), {"timeout": timedelta(seconds=30), "wait_for_workers": False}
    return tuple(dist.TCPStore("127.0.0.1", port, is_master=serves, **limits) for serves in (True, False))


def wait_until_aborted(error):
    """Watch a store, close it, wait for the abort, then raise `error` or return normally."""
    served, store = stores()
    aborted = threading.Event()
    with abort_when_left(store, aborted.set, POLL):
        del served
        assert aborted.wait(DEADLINE), "abort was not called"
        if error is not None:
            raise error


def test_a_waiting_block_is_aborted_when_the_store_is_closed():
    failed = OSError("the communicator is gone")
    with pytest.raises(RuntimeError, match="left the transfer group in the middle of an update") as caught:
        wait_until_aborted(failed)
    assert caught.value.__cause__ is failed


def test_an_aborted_block_that_returns_raises_too():
    """An aborted broadcast returns normally and leaves garbage in its buffer."""
    with pytest.raises(RuntimeError, match="left the transfer group"):
        wait_until_aborted(None)


def test_nothing_happens_while_the_store_is_served():
    served, store = stores()
    aborted, checks = threading.Event(), threading.Semaphore(0)

    class Counted:
        def check(self, keys):
            checks.release()
            return bool(store.check(keys))

    with abort_when_left(Counted(), aborted.set, POLL):
        assert all(checks.acquire(timeout=DEADLINE) for _ in range(3))
    with pytest.raises(KeyError, match="its own"), abort_when_left(store, aborted.set, POLL):
        raise KeyError("its own")
    assert not aborted.is_set()
    served.set("still", "there")
