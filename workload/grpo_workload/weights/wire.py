"""Named tensors packed one behind the other into pieces of memory, as they are sent over a network.

Sender and receiver both know beforehand which tensors a piece holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_workload.weights.buckets import cut

ALIGNMENT = 16  # bytes; a tensor of any type may start at a multiple of it


class TensorSpec(NamedTuple):
    """Name, type and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes up in a piece, with padding."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


def describe(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return `specs` as JSON in the format of vLLM's weight updates; `parse_description` reads it."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def parse_description(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorSpec]:
    """Return the specs that `describe` wrote. Raises ValueError when the lists differ in length."""
    rows = zip(names, dtype_names, shapes, strict=True)
    return [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]


def pieces(specs: Iterable[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each piece: as many as fit into `max_bytes`, or one that is larger."""
    return cut(specs, max_bytes, lambda spec: spec.padded_bytes)


def empty(specs: Iterable[TensorSpec], device: torch.device | str) -> Tensor:
    """Return an uninitialised piece for `specs`: [bytes]."""
    return torch.empty(sum(spec.padded_bytes for spec in specs), dtype=torch.uint8, device=device)


def pack(
    specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield all `weights` packed in pieces, each [bytes]. Keeps no reference to a tensor after copying it.

    Raises:
        ValueError: `weights` differ from `specs`; names the first that does.
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
    """Return the tensors of a piece, as views of it."""
    views, start = [], 0
    for spec in specs:
        views.append((spec.name, bytes_N[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)))
        start += spec.padded_bytes
    return views
