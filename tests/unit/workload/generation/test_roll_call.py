"""Workers and the sender of a transfer group meet in a store: all join, or none does."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_workload.generation.roll_call import RollCall, Seat, open_store
from support.trainer.launchers import eventually, free_ports


def test_workers_join_once_the_sender_says_so_and_not_after_a_meeting_is_called_off():
    (port,) = free_ports(1)
    served = open_store("127.0.0.1", port, timeout_seconds=30, listens=True)

    def check_in(meeting, rank):
        return Seat(open_store("127.0.0.1", port, timeout_seconds=30), meeting, rank).check_in()

    with ThreadPoolExecutor(4) as pool:
        roll = RollCall(served, "1")
        assert roll.missing([1, 2]) == [1, 2]
        early = pool.submit(check_in, "1", 2)
        eventually(lambda: roll.missing([1, 2]) == [1], "the second worker is here")
        late = pool.submit(check_in, "1", 1)
        eventually(lambda: not roll.missing([1, 2]), "both are here")
        assert not early.done()
        assert roll.let_join("29500")
        roll.call_off()
        assert (early.result(30), late.result(30)) == ("29500", "29500"), "who was let join is not called off"

        other = RollCall(served, "2")
        assert other.missing([1, 2]) == [1, 2], "meetings do not mix"
        waiting = pool.submit(check_in, "2", 1)
        eventually(lambda: other.missing([1, 2]) == [2], "the first worker is here")
        other.call_off()
        assert other.is_over
        with pytest.raises(RuntimeError, match=re.escape("transfer group 2 was called off")):
            waiting.result(30)
        assert not other.let_join("29500")


def test_a_worker_gives_up_a_sender_that_says_nothing():
    (port,) = free_ports(1)
    served = open_store("127.0.0.1", port, timeout_seconds=30, listens=True)
    with pytest.raises(RuntimeError):
        Seat(open_store("127.0.0.1", port, timeout_seconds=0.5), "1", 1).check_in()
    del served
