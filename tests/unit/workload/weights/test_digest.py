"""A digest changes with each bit, each pair of small changes and each order; those of parts add up."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.generation.arrivals import Arrivals
from grpo_workload.weights.differ import WeightsAlteredError, WeightsDifferError, some
from grpo_workload.weights.digest import SUMS, digest, mix, sums_spec, with_sums, words
from grpo_workload.weights.wire import pack, pieces, unpack

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8])
SEEDS = st.integers(0, 2**32)


def made(seed, dtype, *shape):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 20).to(dtype)


def numbers(tensor):
    return digest(tensor, sums=True).tolist()


@given(SEEDS, DTYPES, st.data())
def test_each_bit_changes_all_three_numbers(seed, dtype, data):
    tensor = made(seed, dtype, 5, 7)
    before, bits = numbers(tensor), words(tensor.view(-1))  # a view
    size = 8 * bits.element_size()
    flipped = 1 << data.draw(st.integers(0, size - 1))
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= flipped - 2**size if flipped >> (size - 1) else flipped
    assert all(one != other for one, other in zip(before, numbers(tensor), strict=True))


@given(SEEDS, st.sampled_from([torch.bfloat16, torch.float32]), st.permutations(range(35)))
def test_a_pair_of_steps_of_one_ulp_is_seen(seed, dtype, order):
    tensor = made(seed, dtype, 5, 7)
    before, bits = numbers(tensor), words(tensor.view(-1))
    up, down = order[:2]
    is_swap = int(bits[up]) + 1 == int(bits[down])
    bits[up] += 1
    bits[down] -= 1
    after = numbers(tensor)
    assert after[0] != before[0]
    assert after[1] == before[1], "a plain sum does not see it"
    assert is_swap or after[2] != before[2]


@given(SEEDS, DTYPES, st.integers(0, 3), st.integers(4, 7))
def test_swapped_rows_change_the_first_number_alone(seed, dtype, one, other):
    tensor = made(seed, dtype, 8, 6)
    swapped = tensor.clone()
    swapped[[one, other]] = tensor[[other, one]]
    before, after = numbers(tensor), numbers(swapped)
    assert (before[0] == after[0]) == torch.equal(tensor, swapped)
    assert before[1:] == after[1:]


@given(SEEDS, DTYPES, st.integers(0, 8), st.integers(0, 5))
def test_parts_add_up_and_padding_adds_nothing(seed, dtype, cut, padding):
    tensor = made(seed, dtype, 8, 6)
    padded = torch.cat([tensor, torch.zeros(padding, 6, dtype=dtype)])
    parts = torch.stack([digest(part, sums=True) for part in (tensor[:cut], tensor[cut:])]).sum(0).tolist()
    assert numbers(padded)[1:] == numbers(tensor)[1:] == parts[1:] == numbers(tensor.t())[1:]
    assert numbers(tensor.t().contiguous().t()) == numbers(tensor), "what counts is what a tensor holds, not how"


def test_mixing_maps_no_two_numbers_to_one():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    near = [every, every * 2**16, every * 2**8]
    assert all(len(mix(some).unique()) == 2**16 for some in near)
    assert mix(torch.zeros(1, dtype=torch.int32)) == 0


@given(st.integers(0, 2**32 - 1))
def test_numbers_are_mixed_as_on_gpus(number):
    """Of 32 bits without a sign, as in `digest_kernel.py`."""
    mixed = number * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 % 2**32
    own = mix(torch.tensor([number - 2**32 if number >= 2**31 else number], dtype=torch.int32))
    assert int(own) % 2**32 == mixed ^ mixed >> 13


@pytest.mark.parametrize(("count", "said"), [(1, "0"), (8, "0, 1, 2, 3, 4, 5, 6, 7")])
def test_few_names_are_all_said(count, said):
    assert some([*map(str, range(count))]) == said
    many = [*map(str, range(9))]
    assert some(many) == "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"


@pytest.mark.parametrize("change", ["bit", "none", "lost"])
def test_what_arrives_must_be_what_was_sent(change):
    weights = [
        ("a.weight", made(1, torch.bfloat16, 3, 5)),
        ("b.bias", made(2, torch.float32, 7)),
        ("c", torch.ones(())),
    ]
    specs: list[Any] = [*map(spec_of, weights), sums_spec(3)]
    arrivals = Arrivals(torch.device("cpu"))
    packed = list(pack(specs, with_sums(weights, "cpu"), 64, "cpu"))
    if change == "bit":
        packed[0][32 + 9] ^= 4  # the second one follows 30 bytes and padding
    received = [one for some in zip(packed, pieces(specs, 64), strict=True) for one in unpack(*some)]
    if change == "lost":
        received.pop(1)
    assert SUMS not in [name for name, _ in arrivals.received(received)]
    if change == "none":
        arrivals.check()
        return
    if change == "bit":
        with pytest.raises(WeightsAlteredError, match=r"^weights altered: b\.bias changed between"):
            arrivals.check()
    else:
        with pytest.raises(WeightsDifferError, match=r"2 weights arrived with digests of 3$"):
            arrivals.check()


def spec_of(weight):
    return sums_spec(0)._replace(name=weight[0], dtype=weight[1].dtype, shape=tuple(weight[1].shape))
