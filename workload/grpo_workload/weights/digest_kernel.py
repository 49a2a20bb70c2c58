"""The kernels that compute a tensor's digest on GPUs. Each reads the tensor once; most digests need the first alone."""

# mypy: ignore-errors

from __future__ import annotations

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


@triton.jit
def _mix(bits):
    mixed = bits * 2654435761
    mixed ^= mixed >> 15
    mixed *= 2246822519
    return mixed ^ (mixed >> 13)


@triton.jit
def _order(words, out, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    order = tl.zeros((BLOCK,), dtype=tl.int64)
    for _ in range(ROUNDS):
        word = tl.load(words + places, mask=places < count, other=0).to(tl.int64)
        # Folded, so that no difference has its lowest bit where the product of two swapped words would lose it.
        word ^= (word >> 32) & 0xFFFFFFFF
        odd = _mix(places.to(tl.uint32) ^ ((places >> 32) * 40503).to(tl.uint32)) | 1
        order += word * odd.to(tl.int64)
        places += BLOCK
    tl.atomic_add(out, tl.sum(order))


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
