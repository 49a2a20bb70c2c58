"""Finds tensors that vLLM has made of weights and that a push leaves as they were.

A layer may keep its weights in a second form that vLLM's reload does not know, such as a view whose parameter got other
memory. So the operations of the first load are followed: whatever they make of weights must be made or written again
when weights are pushed. Tables that follow from the configuration alone, such as those of RoPE, need not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

_MADE_OF_WEIGHTS: WeakKeyDictionary[nn.Module, list[frozenset[str]]] = WeakKeyDictionary()
"""By model: names of what the first load has made of weights, once for each push that is still to be watched."""
PUSHES = 2
"""Number of pushes that are watched: the second sees what the first forward pass has put in place of something."""

_CONSTANT = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_CONSTANT |= {"arange", "linspace", "eye", "scalar_tensor"}
_REPLACING = {"copy_", "fill_", "zero_"}


@contextmanager
def followed(model: nn.Module) -> Iterator[None]:
    """Within it, vLLM loads the weights of `model`, which it has just built, for the first time."""
    with _Load(model) as load:
        yield
    names = frozenset(name for name, tensor in held(model).items() if not load.is_free(tensor))
    _MADE_OF_WEIGHTS[model] = [names] * PUSHES


def follow_loads() -> None:
    """Let vLLM's loaders follow each first load; called in each of vLLM's processes, in some more than once."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    plain: Any = BaseModelLoader.load_model
    if plain.__module__ == __name__:
        return

    def load_model(self: Any, *args: Any, **kwargs: Any) -> nn.Module:
        load_weights = self.load_weights
        with ExitStack() as rest:  # of the load, once the model is built

            def load_and_follow(model: nn.Module, *others: Any) -> None:
                rest.enter_context(followed(model))
                load_weights(model, *others)

            self.load_weights = load_and_follow
            try:
                model: nn.Module = plain(self, *args, **kwargs)
            finally:
                del self.load_weights  # of the instance; the class keeps its own
        return model

    BaseModelLoader.load_model = load_model


class Push(TorchDispatchMode):
    """A push of weights to `model`; made before vLLM prepares its layers, and entered wherever it changes them.

    Once `PUSHES` have made everything again, later ones see nothing and cost nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, watched = model, _MADE_OF_WEIGHTS.get(model)
        names = watched[-1] if watched else frozenset()
        tensors = {name: tensor for name, tensor in held(model).items() if name in names} if names else {}
        self._names, self._unwritten = frozenset(tensors), storages(tensors.values())
        self._kept = [*self._unwritten.values()]  # no new tensor may get the address of an old one

    def __enter__(self) -> Push:
        """Begin or go on."""
        return super().__enter__() if self._names else self  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Pause or end."""
        if self._names:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operation writes to."""
        for place in storages(written(func, args, kwargs or {})):
            self._unwritten.pop(place, None)
        return func(*args, **(kwargs or {}))

    def finish(self, frozen: Collection[str] = ()) -> list[str]:
        """Return the names of tensors that were made of other weights than those that were pushed.

        Args:
            frozen: parts of the model whose weights are never pushed.
        """
        after = held(self._model) if self._unwritten else {}
        names = [name for name in after if name in self._names and name.partition(".")[0] not in frozen]
        stale = [name for name in names if self._unwritten.keys() & storages([after[name]])]
        self._kept, self._unwritten = [], {}
        if self._names and not stale:
            _MADE_OF_WEIGHTS[self._model].pop()
        return stale


class _Load(TorchDispatchMode):
    """Knows in which storages there is nothing of the weights: buffers and tables of a model just built, and so on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        weights = storages(model.parameters())
        self._free = {place: one for place, one in storages(held(model).values()).items() if place not in weights}

    def is_free(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the same with any weights."""
        return self._free.keys() >= storages([tensor]).keys()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow weights from what an operation takes to what it makes or writes to."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.rpartition(":")[2] if hasattr(func, "_schema") else ""
        taken, changed = storages((*args, *kwargs.values())), storages(written(func, args, kwargs))
        changed |= {place: one for place, one in storages([result]).items() if place not in taken}
        if not changed and name != "lift_fresh":  # a view
            return result
        # Of empty tensors it is not known what fills them: kernels of Triton are no operations.
        is_free = bool(taken) and taken.keys() <= self._free.keys() and "empty" not in name
        if name in _REPLACING and args[0].nbytes == args[0].untyped_storage().nbytes():
            is_free = storages(args[1:]).keys() <= self._free.keys()
        elif name == "lift_fresh" and result.dtype != torch.uint8:  # torch.tensor of numbers; of files there are bytes
            is_free, changed = True, taken
        if is_free or name in _CONSTANT:
            self._free |= changed
        else:
            for place in changed:
                self._free.pop(place, None)
        return result


def held(model: nn.Module) -> dict[str, Tensor]:
    """Return all floating-point tensors that the layers of `model` hold, by name.

    They are parameters, buffers and attributes, also those in lists, in closures, and in objects of vLLM's.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found.update(_tensors(path if name in ("_parameters", "_buffers") else f"{path}.{name}", value, seen))
    return {name.removeprefix("."): tensor for name, tensor in found.items()}


def _tensors(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not isinstance(value, UninitializedParameter) and value.is_floating_point() and value.numel():
            yield path, value
    elif (inner := _inside(value)) and id(value) not in seen:
        seen.add(id(value))
        for name, one in inner.items():
            yield from _tensors(f"{path}.{name}", one, seen)


def _inside(value: Any) -> dict[Any, Any]:
    match value:
        case dict():
            return value
        case list() | tuple():
            return dict(enumerate(value))
        case partial():
            return {"args": value.args, **value.keywords}
        case FunctionType():
            return dict(zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True))
    kind = type(value).__module__
    is_layers = kind.startswith("vllm.") and not kind.startswith("vllm.config") and not isinstance(value, nn.Module)
    return getattr(value, "__dict__", {}) if is_layers else {}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def storages(values: Iterable[Any]) -> dict[int, UntypedStorage]:
    """Return the memory of tensors, also of those in lists, by address: a view has that of what it shows."""
    found: dict[int, UntypedStorage] = {}
    for value in values:
        if isinstance(value, list | tuple):
            found |= storages(value)
        elif isinstance(value, Tensor) and not isinstance(value, UninitializedParameter) and not value.is_meta:
            try:
                storage = value.untyped_storage()
            except (NotImplementedError, RuntimeError):  # of a wrapper around other tensors
                continue
            found[storage._cdata] = storage
    return found


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield what an operation writes to."""
    for number, name in _targets(func):
        yield args[number] if number < len(args) else kwargs.get(name)


@cache
def _targets(func: Any) -> list[tuple[int, str]]:
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return [
        (number, one.name)
        for number, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
