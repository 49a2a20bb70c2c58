"""The kernels that compute a tensor's digest on GPUs. Each reads the tensor once; most digests need the first alone."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROUNDS = 1024, 16
"""Words that a program reads at a time, and how many times."""


def digest_on_gpu(wide_M: Tensor, words_N: Tensor | None) -> Tensor:
    """Return [order, bits, mixed] of a tensor's bits, as int64 on its device.

    Args:
        wide_M: its bits as `digest.wide` reads them.
        words_N: its bits as `digest.words` reads them; None: without `bits` and `mixed`, which are 0 then.
    """
    out = torch.zeros(3, dtype=torch.int64, device=wide_M.device)
    for kernel, some in ((_order, wide_M), (_any_order, words_N)):
        if some is not None and some.numel():
            kernel[(triton.cdiv(some.numel(), BLOCK * ROUNDS),)](some, out, some.numel(), BLOCK=BLOCK, ROUNDS=ROUNDS)
    return out


def orders_on_gpu(tensors: Sequence[Tensor]) -> Tensor:
    """Return [order, 0, 0] of each tensor as `digest_on_gpu` does, [tensors, 3], by one kernel.

    Args:
        tensors: on one GPU, their bits as numbers of 64 bits, not empty.
    """
    counts = np.array([one.numel() for one in tensors], dtype=np.int64)
    programs = -(-counts // (BLOCK * ROUNDS))
    owners = np.repeat(np.arange(len(tensors)), programs)
    first = (np.arange(programs.sum()) - np.repeat(programs.cumsum() - programs, programs)) * (BLOCK * ROUNDS)
    addresses = np.array([one.data_ptr() for one in tensors], dtype=np.int64)
    table = torch.from_numpy(np.stack([addresses[owners], first, counts[owners], owners], axis=1))
    out = torch.zeros(len(tensors), 3, dtype=torch.int64, device=tensors[0].device)
    _orders[(len(owners),)](table.to(out.device), out, BLOCK=BLOCK, ROUNDS=ROUNDS)
    return out


@triton.jit
def _mix(bits):
    mixed = bits * 2654435761
    mixed ^= mixed >> 15
    mixed *= 2246822519
    return mixed ^ (mixed >> 13)


@triton.jit
def _order(words, out, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    tl.atomic_add(out, _order_of(words, first, count, BLOCK, ROUNDS))


@triton.jit
def _orders(table, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    row = table + tl.program_id(0) * 4  # address, first place, numbers of the tensor, its position
    words = tl.load(row).to(tl.pointer_type(tl.int64))
    order = _order_of(words, tl.load(row + 1), tl.load(row + 2), BLOCK, ROUNDS)
    tl.atomic_add(out + tl.load(row + 3) * 3, order)


@triton.jit
def _order_of(words, first, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    places = first + tl.arange(0, BLOCK)
    order = tl.zeros((BLOCK,), dtype=tl.int64)
    for _ in range(ROUNDS):
        word = tl.load(words + places, mask=places < count, other=0).to(tl.int64)
        # Folded, so that no difference has its lowest bit where the product of two swapped words would lose it.
        word ^= (word >> 32) & 0xFFFFFFFF
        odd = _mix(places.to(tl.uint32) ^ ((places >> 32) * 40503).to(tl.uint32)) | 1
        order += word * odd.to(tl.int64)
        places += BLOCK
    return tl.sum(order)


@triton.jit
def _any_order(words, out, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), dtype=tl.int64)
    mixed = tl.zeros((BLOCK,), dtype=tl.int64)
    for _ in range(ROUNDS):
        word = tl.load(words + places, mask=places < count, other=0).to(tl.int32)
        bits += word.to(tl.int64)
        mixed += _mix(word.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True).to(tl.int64)
        places += BLOCK
    tl.atomic_add(out + 1, tl.sum(bits))
    tl.atomic_add(out + 2, tl.sum(mixed))
