"""The kernel that computes a tensor's digest on GPUs. It reads each number once."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROUNDS = 1024, 16
"""Numbers that a program reads at a time, and how many times."""


def digest_on_gpu(words_N: Tensor) -> Tensor:
    """Return [order, bits, mixed] of a tensor's bits (`digest.words`), as int64 on its device."""
    out = torch.zeros(3, dtype=torch.int64, device=words_N.device)
    if words_N.numel():
        _add[(triton.cdiv(words_N.numel(), BLOCK * ROUNDS),)](words_N, out, words_N.numel(), BLOCK=BLOCK, ROUNDS=ROUNDS)
    return out


@triton.jit
def _mix(bits):
    mixed = bits * 2654435761
    mixed ^= mixed >> 15
    mixed *= 2246822519
    return mixed ^ (mixed >> 13)


@triton.jit
def _add(words, out, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    order = tl.zeros((BLOCK,), dtype=tl.int64)
    bits = tl.zeros((BLOCK,), dtype=tl.int64)
    mixed = tl.zeros((BLOCK,), dtype=tl.int64)
    for _ in range(ROUNDS):
        word = tl.load(words + places, mask=places < count, other=0).to(tl.int32)
        odd = _mix(places.to(tl.uint32) ^ ((places >> 32) * 40503).to(tl.uint32)) | 1
        order += word.to(tl.int64) * odd.to(tl.int64)
        bits += word.to(tl.int64)
        mixed += _mix(word.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True).to(tl.int64)
        places += BLOCK
    tl.atomic_add(out, tl.sum(order))
    tl.atomic_add(out + 1, tl.sum(bits))
    tl.atomic_add(out + 2, tl.sum(mixed))
