"""Asserts that buckets keep the order and the size limit, and that one item is produced ahead of the one in use."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.weights.buckets import cut, one_ahead

DEADLINE = 20


@given(sizes=st.lists(st.integers(0, 9)), limit=st.integers(1, 12))
def test_buckets_are_as_few_as_their_size_allows(sizes, limit):
    buckets = list(cut(sizes, limit, lambda size: size))
    assert [size for bucket in buckets for size in bucket] == sizes
    assert all(sum(bucket) <= limit or len(bucket) == 1 for bucket in buckets)
    assert all(sum(first) + second[0] > limit for first, second in pairwise(buckets))


@given(items=st.lists(st.integers()))
def test_items_produced_ahead_come_in_order(items):
    with one_ahead(iter(items)) as made:
        assert list(made) == items


def test_only_the_next_item_is_produced_while_one_is_used():
    makers, began = [], [threading.Event() for _ in range(4)]

    def make() -> Iterator[int]:
        for item in range(4):
            makers.append(threading.current_thread().name)
            began[item].set()
            yield item

    prepared: list[str] = []
    with one_ahead(make(), lambda: prepared.append(threading.current_thread().name)) as made:
        assert next(made) == 0
        assert began[1].wait(DEADLINE)
        assert not began[2].is_set()
        assert list(made) == [1, 2, 3]
    assert {*makers, *prepared} == {makers[0]} != {threading.current_thread().name}


def test_leaving_early_waits_for_the_item_in_production_and_keeps_the_rest():
    go, items = threading.Event(), []

    def make() -> Iterator[int]:
        for item in range(4):
            if item == 1:
                assert go.wait(DEADLINE)
            items.append(item)
            yield item

    rest = make()
    with one_ahead(rest) as made:
        assert next(made) == 0
        threading.Timer(0.05, go.set).start()
    assert items == [0, 1]
    assert list(rest) == [2, 3]


def test_a_failure_in_producing_an_item_is_raised_where_it_is_taken():
    def make() -> Iterator[int]:
        yield 0
        raise ValueError("a rank is gone")

    with one_ahead(make()) as made:
        assert next(made) == 0
        with pytest.raises(ValueError, match="a rank is gone"):
            next(made)
