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


class Source(NamedTuple):
    """A part of a weight, as it arrives."""

    weight: str
    part: Place | None  # None: all of it, in order

    def of(self, arrived: Tensor) -> Tensor | None:
        """Return the part of the weight that has arrived; None if it has no such part."""
        return arrived if self.part is None else self.part.of(arrived)


class Copy(NamedTuple):
    """Values copied into a place."""

    digest: int  # its position in `Arrivals`
    dtype: torch.dtype
    is_sent: bool  # else a loader has computed them
    source: Source | None = None  # where they are known to be a part of one weight, of this type


Copied = dict[str, dict[Place, Copy | None]]
"""By parameter and place. None: computed in place."""


class _Weight(NamedTuple):
    """A weight that was copied: its place, in numbers of its storage."""

    name: str
    start: int
    numel: int
    dtype: torch.dtype


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
        self._weights: dict[int, list[_Weight]] = {}  # by the storage in which they came
        self._last: tuple[Tensor, int] | None = None
        self.copied: Copied = {}

    def arrived(self, name: str, tensor: Tensor, at: int) -> None:
        """Note a weight before vLLM gets it, and the position of its digest."""
        self._last, storage = (tensor, at), tensor.untyped_storage()
        self._sources.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        if tensor.is_contiguous():
            weight = _Weight(name, int(tensor.storage_offset()), tensor.numel(), tensor.dtype)
            self._weights.setdefault(storage._cdata, []).append(weight)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is copied, and where to."""
        for address in storages(written(func, args, kwargs or {})).keys() & self._sources.keys():
            # A loader changes what has arrived, as that of GPT-OSS where biases are those of another rank.
            del self._sources[address]
            self._weights.pop(address, None)
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
            is_sent = address in self._sources
            copies[place] = Copy(self._digest(owner, to, src), to.dtype, is_sent, self._source(to, src))

    def _source(self, to: Tensor, src: Tensor) -> Source | None:
        if src.dtype != to.dtype or src.shape != to.shape:
            return None
        start = int(src.storage_offset())
        last = start + sum((size - 1) * step for size, step in zip(src.shape, src.stride(), strict=True))
        for weight in self._weights.get(src.untyped_storage()._cdata, ()):
            if weight.dtype == src.dtype and weight.start <= start and last < weight.start + weight.numel:
                is_whole = src.is_contiguous() and src.numel() == weight.numel
                part = None if is_whole else Place(start - weight.start, tuple(src.shape), tuple(src.stride()))
                return Source(weight.name, part)
        return None

    def _digest(self, owner: str, to: Tensor, src: Tensor) -> int:
        sums = self._needs_sums(owner)
        if self._last is not None and not sums:
            tensor, at = self._last
            is_whole = src.data_ptr() == tensor.data_ptr() and src.numel() == tensor.numel()
            if is_whole and src.dtype == to.dtype == tensor.dtype and src.is_contiguous() and tensor.is_contiguous():
                return at
        return self._take(src.to(to.dtype).expand(to.shape), sums=sums)


Recipe = dict[str, list[tuple[str, Place, Source, torch.dtype]]]
"""By weight: the parameters and places that get parts of it."""


def recipe_of(copied: Copied) -> Recipe | None:
    """Return what loaders do with each weight; None if they do more than copy parts of weights as they are."""
    recipe: Recipe = {}
    for owner, copies in copied.items():
        for place, copy in copies.items():
            if copy is None or not copy.is_sent or copy.source is None:
                return None
            recipe.setdefault(copy.source.weight, []).append((owner, place, copy.source, copy.dtype))
    return recipe


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of `model` by name; those that layers share come under each name."""
    for path, layer in model.named_modules():
        for name, one in [*layer._parameters.items(), *layer._buffers.items()]:
            if one is not None and not isinstance(one, UninitializedParameter):
                yield f"{path}.{name}".removeprefix("."), one
