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
HELD_BYTES = 2**27
"""Bytes of tensors whose digests one kernel computes."""
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


class Digests:
    """Digests of many tensors, computed where `device` is.

    On GPUs one kernel takes many of them, as launching it takes longer than most tensors: they are held until then.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._found: list[Tensor] = []  # of one or more tensors each, [n, 3]
        self._held: list[Tensor] = []  # those without digests yet, as `wide` reads them
        self._held_bytes = 0
        self._count = 0

    def take(self, tensor: Tensor, *, sums: bool) -> int:
        """Return a tensor's place in `all`; it must not change before `settle`."""
        self._count += 1
        moved = tensor.detach().to(self._device)
        if sums or self._device.type != "cuda" or moved.nbytes % 8 or not moved.is_contiguous() or not moved.numel():
            self.settle()
            self._found.append(digest(moved, sums=sums).unsqueeze(0))
            return self._count - 1
        self._held.append(wide(moved.reshape(-1)))
        self._held_bytes += moved.nbytes
        if self._held_bytes >= HELD_BYTES:
            self.settle()
        return self._count - 1

    def settle(self) -> None:
        """Compute the digests of all tensors up to here; they may change then."""
        if self._held:
            from grpo_workload.weights.digest_kernel import orders_on_gpu

            self._found.append(orders_on_gpu(self._held))
            self._held, self._held_bytes = [], 0

    def all(self) -> Tensor:
        """Return all digests [tensors, 3], on the device."""
        self.settle()
        return torch.cat(self._found) if self._found else torch.empty(0, 3, dtype=torch.int64, device=self._device)


def with_sums(weights: Iterable[tuple[str, Tensor]], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, then their digests as `sums_spec` describes them.

    Args:
        weights: names and tensors, as they are sent; each stays as it is for a while after the next one is taken.
        device: where they are received.
    """
    digests = Digests(device)
    for name, tensor in weights:
        digests.take(tensor, sums=False)
        yield name, tensor
    yield SUMS, digests.all()
