"""Named tensors one after the other in pieces of memory, as they cross a network; both sides know beforehand what they will hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_workload.buckets import cut

ALIGNMENT = 16  # bytes: a tensor of any type may begin there


class TensorSpec(NamedTuple):
    """What there is to know of a tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that it takes in a piece."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


def describe(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """`specs` as JSON, in the terms of vLLM's updates; `described` reads it."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def described(names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """What `describe` was told. ValueError when the lists differ in length."""
    rows = zip(names, dtype_names, shapes, strict=True)
    return [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]


def pieces(specs: Iterable[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    """Which tensors share a piece: as many as fit into `max_bytes`, or one that is larger."""
    return cut(specs, max_bytes, lambda spec: spec.room)


def empty(specs: Iterable[TensorSpec], device: torch.device | str) -> Tensor:
    """A piece for `specs`, not written: [bytes]."""
    return torch.empty(sum(spec.room for spec in specs), dtype=torch.uint8, device=device)


def pack(
    specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: torch.device | str
) -> Iterator[Tensor]:
    """All `weights`, which `specs` tells of, in pieces: each [bytes]. A tensor is given up once it was copied.

    Raises:
        ValueError: `weights` are others than `specs`; names the first.
    """
    remaining = zip(specs, weights, strict=True)
    for share in pieces(specs, max_bytes):
        bytes_N = empty(share, device)
        for (_, view), (spec, (name, tensor)) in zip(unpack(bytes_N, share), remaining, strict=False):
            if (found := TensorSpec(name, tensor.dtype, tuple(tensor.shape))) != spec:
                raise ValueError(f"a weight is {found}, and was announced as {spec}")
            view.copy_(tensor.detach())
        yield bytes_N
    next(remaining, None)


def unpack(bytes_N: Tensor, specs: Iterable[TensorSpec]) -> list[tuple[str, Tensor]]:
    """The tensors of a piece, as views of it."""
    views, start = [], 0
    for spec in specs:
        views.append((spec.name, bytes_N[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)))
        start += spec.room
    return views
