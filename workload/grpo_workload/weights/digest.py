"""Digests of tensors: three numbers that change when a bit, a number or an order does. Equal tensors have equal ones.

Trainer and engine compute them apart, of the same kind of device, and compare them. On CPUs a hash of the bytes takes
the first number's place: it reads 10 GB/s for each core. The other two, 0.3 GB/s there, are computed where they are
needed. On GPUs kernels of Triton compute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from grpo_workload.weights.wire import TensorSpec

SUMS = "digests of all weights before"
"""Name of the last tensor of a push: [weights, 3], the digest of each in the order in which they were sent."""

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""The integers that a tensor's bits are read as, by the bytes of a number."""
PART = 2**15  # numbers at a time on CPUs; their sums' intermediate values stay in the cache


def digest(tensor: Tensor, *, sums: bool) -> Tensor:
    """Return [order, bits, mixed] as int64 on the tensor's device, modulo 2^64.

    `order` depends on each bit and its place: on GPUs the sum of all bits as numbers, each times an odd one by its
    place; on CPUs the XXH3 of the bytes. `bits` and `mixed`, the sums of bits and of mixed bits, are the same in any
    order: those of parts add up, and zeros add nothing. They are 0 without `sums`.
    """
    flat_N = tensor.detach().reshape(-1)
    if flat_N.is_cuda:
        from grpo_workload.weights.digest_kernel import digest_on_gpu

        return digest_on_gpu(wide(flat_N), words(flat_N) if sums else None)
    order = xxhash.xxh3_64_intdigest(flat_N.contiguous().view(torch.uint8).numpy().data)
    bits, mixed = any_order(words(flat_N)) if sums else (0, 0)
    return torch.tensor([order - 2**64 if order >= 2**63 else order, bits, mixed], device="cpu")


def wide(flat_N: Tensor) -> Tensor:
    """Return a tensor's bits as numbers of 64, or as `words` where they do not fill such.

    It depends on the tensor's size and type alone: what is not where such numbers may be is copied.
    """
    if flat_N.nbytes % 8:
        return words(flat_N)
    bytes_B = flat_N.contiguous().view(torch.uint8)
    return (bytes_B.clone() if bytes_B.data_ptr() % 8 else bytes_B).view(torch.int64)


def words(flat_N: Tensor) -> Tensor:
    """Return a tensor's bits as integers, whose number is that of its values, or twice that of 8-byte values."""
    return flat_N.contiguous().view(WORDS[flat_N.element_size()])


def any_order(words_N: Tensor) -> tuple[int, int]:
    """Return the sums of bits and of mixed bits; one changed number changes both."""
    total = torch.zeros(2, dtype=torch.int64)
    for part_P in torch.split(words_N, PART):
        bits_P = part_P.to(torch.int32)
        total[0] += bits_P.sum(dtype=torch.int64)
        total[1] += mix(bits_P).sum(dtype=torch.int64)
    return int(total[0]), int(total[1])


def mix(bits_P: Tensor) -> Tensor:
    """Return int32 numbers mixed, one to one; 0 stays 0."""
    mixed_P = bits_P * -1640531535
    mixed_P ^= (mixed_P >> 15) & 0x1FFFF
    mixed_P *= -2048144777
    mixed_P ^= (mixed_P >> 13) & 0x7FFFF
    return mixed_P


def sums_spec(count: int) -> TensorSpec:
    """Return what describes the last tensor of a push of `count` weights."""
    return TensorSpec(SUMS, torch.int64, (count, 3))


def with_sums(weights: Iterable[tuple[str, Tensor]], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, then their digests as `sums_spec` describes them.

    Args:
        weights: names and tensors, as they are sent.
        device: where they are received.
    """
    digests = []
    for name, tensor in weights:
        digests.append(digest(tensor.to(device), sums=False))
        yield name, tensor
    yield SUMS, torch.stack(digests) if digests else torch.empty(0, 3, dtype=torch.int64, device=device)
