"""Ranks wait for a late one as long as it gets on, and name one that is silent."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from grpo_workload.ranks.pulse import BEATS, Pulse


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def make_ranks(server, count, limit, **arguments):
    """Return a pulse for each of `count` ranks, on connections of their own."""
    stores = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(count)]
    return [
        Pulse(store, rank=rank, world_size=count, limit_seconds=limit, **arguments) for rank, store in enumerate(stores)
    ]


def test_ranks_wait_longer_than_the_limit_for_one_that_gets_on(server, pool):
    beats: list[None] = []
    ranks = make_ranks(server, 3, 2, on_beat=lambda: beats.append(None))
    for enough in (BEATS + 5, BEATS + 6):
        waiting = [pool.submit(rank.meet) for rank in ranks[:2]]
        tokens = 0
        while len(beats) < enough:
            ranks[2].beat()
            tokens += 1
            assert not any(one.done() for one in waiting)
        assert tokens > 10, "a beat stands for many tokens"
        ranks[2].meet()
        for one in waiting:
            one.result(10)


def test_a_silent_rank_is_named_by_those_that_wait(server, pool):
    ranks = make_ranks(server, 3, 0.2)
    waiting = [pool.submit(rank.meet) for rank in ranks[:2]]
    for one in waiting:
        with pytest.raises(RuntimeError, match=r"rank 2 has sampled no token and scored no answer for 0.2 s"):
            one.result(20)


def test_a_rank_alone_waits_for_nobody(server):
    (alone,) = make_ranks(server, 1, 1)
    alone.meet()
    alone.meet()
