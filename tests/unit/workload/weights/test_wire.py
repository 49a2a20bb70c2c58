"""Tensors are unpacked as they were packed; buckets keep order and limit; one item is produced ahead of that in use."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.weights.buckets import cut, one_ahead
from grpo_workload.weights.wire import ALIGNMENT, TensorSpec, describe, pack, parse_description, pieces, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def spec(name, tensor):
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


@given(kinds=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES)), max_bytes=st.integers(1, 400))
def test_unpacked_tensors_equal_packed_ones(kinds, max_bytes):
    weights = [(str(index), torch.randint(-9, 9, shape).to(dtype)) for index, (dtype, shape) in enumerate(kinds)]
    specs = [spec(*weight) for weight in weights]
    assert parse_description(**describe(specs)) == specs
    packed = list(pack(specs, iter(weights), max_bytes, "cpu"))
    shares = list(pieces(specs, max_bytes))
    assert all(bytes_N.numel() <= max_bytes or len(share) == 1 for bytes_N, share in zip(packed, shares, strict=True))
    received = [one for bytes_N, share in zip(packed, shares, strict=True) for one in unpack(bytes_N.clone(), share)]
    assert [spec(*one) for one in received] == specs
    assert all(one.equal(tensor) for (_, one), (_, tensor) in zip(received, weights, strict=True))


def test_tensors_are_described_in_the_format_of_vllm():
    described_w = describe([TensorSpec("w", torch.bfloat16, (2, 3))])
    assert described_w == {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


def test_a_tensor_may_be_a_view_and_is_taken_only_for_its_own_piece():
    taken = []

    def weights():
        for index in range(3):
            taken.append(index)
            yield str(index), torch.arange(8.0).view(2, 4).T + index

    specs = [TensorSpec(str(index), torch.float32, (4, 2)) for index in range(3)]
    packed = pack(specs, weights(), 2 * ALIGNMENT, "cpu")
    first = next(packed)
    assert taken == [0]
    assert unpack(first, specs[:1])[0][1].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("a", torch.zeros(2)), ("x", torch.zeros(3))], "name='x'.* announced as .*name='b'"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(1))], r"shape=\(1,\).* announced as .*shape=\(3,\)"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3).half())], "float16.* announced as .*float32"),
        ([("a", torch.zeros(2))], "shorter"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))], "longer"),
    ],
)
def test_weights_that_differ_from_their_specs_are_refused(weights, message):
    specs = [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.float32, (3,))]
    with pytest.raises(ValueError, match=message):
        list(pack(specs, weights, 2**10, "cpu"))


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

    def make():
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

    def make():
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
    def make():
        yield 0
        raise ValueError("a rank is gone")

    with one_ahead(make()) as made:
        assert next(made) == 0
        with pytest.raises(ValueError, match="a rank is gone"):
            next(made)
