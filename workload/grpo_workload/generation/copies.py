"""Follows what vLLM's loaders copy into parameters: whatever they make of weights, they end with copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_workload.generation.derived import storages, written

COPY = torch.ops.aten.copy_.default


class Place(NamedTuple):
    """A part of a parameter, in numbers."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, one: Tensor) -> Tensor | None:
        """Return the part of a tensor; None if it has no such part."""
        last = self.start + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        if last >= one.numel() or not one.is_contiguous():
            return None
        return one.detach().as_strided(self.shape, self.stride, one.storage_offset() + self.start)


class Copy(NamedTuple):
    """Values copied into a place."""

    digest: int  # its position in `Arrivals`
    dtype: torch.dtype
    is_sent: bool  # else a loader has computed them


Copied = dict[str, dict[Place, Copy | None]]
"""By parameter and place. None: computed in place."""


class Copies(TorchDispatchMode):
    """Notes each copy into a parameter or buffer of `model`, while its weights are loaded.

    Most are on the meta device then: vLLM counts what arrives, and keeps it until a layer is whole.
    """

    def __init__(self, model: nn.Module, take: Callable[..., int], needs_sums: Callable[[str], bool]) -> None:
        """`take`: see `Arrivals`. `needs_sums` tells of which parameter it shall compute the sums."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._take, self._needs_sums = take, needs_sums
        self._kept = list(held(model))  # so that no other tensor gets the address of one of these
        self._owners = {one.untyped_storage()._cdata: name for name, one in self._kept}
        self._sources: dict[int, StorageWeakRef] = {}  # a reference keeps the address, not the memory
        self._last: tuple[Tensor, int] | None = None
        self.copied: Copied = {}

    def arrived(self, tensor: Tensor, at: int) -> None:
        """Note a weight before vLLM gets it, and the position of its digest."""
        self._last, storage = (tensor, at), tensor.untyped_storage()
        self._sources.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is copied, and where to."""
        if self._last is not None:
            address = self._last[0].untyped_storage()._cdata
            if address in storages(written(func, args, kwargs or {})):
                # A loader changes what has arrived, as that of GPT-OSS where biases are those of another rank.
                self._sources.pop(address, None)
                self._last = None
        if func is COPY and args[0].numel() and (owner := self._owners.get(args[0].untyped_storage()._cdata)):
            self._note(owner, args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, owner: str, to: Tensor, src: Tensor) -> None:
        place, address = (
            Place(int(to.storage_offset()), tuple(to.shape), tuple(to.stride())),
            src.untyped_storage()._cdata,
        )
        copies = self.copied.setdefault(owner, {})
        if src.is_meta:
            copies[place] = None
        elif address not in self._owners:  # else a layer puts its own tensor back
            copies[place] = Copy(self._digest(owner, to, src), to.dtype, address in self._sources)

    def _digest(self, owner: str, to: Tensor, src: Tensor) -> int:
        sums = self._needs_sums(owner)
        if self._last is not None and not sums:
            tensor, at = self._last
            is_whole = src.data_ptr() == tensor.data_ptr() and src.numel() == tensor.numel()
            if is_whole and src.dtype == to.dtype == tensor.dtype and src.is_contiguous() and tensor.is_contiguous():
                return at
        return self._take(src.to(to.dtype).expand(to.shape), sums=sums)


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of `model` by name; those that layers share come under each name."""
    for path, layer in model.named_modules():
        for name, one in [*layer._parameters.items(), *layer._buffers.items()]:
            if one is not None and not isinstance(one, UninitializedParameter):
                yield f"{path}.{name}".removeprefix("."), one
