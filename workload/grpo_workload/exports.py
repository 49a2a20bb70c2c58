"""A model's full weights by name, as an engine or a checkpoint takes them, though ZeRO-3 keeps them in parts and LoRA in factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import deepspeed
from torch import Tensor, nn

from grpo_workload.buckets import cut
from grpo_workload.packing import TensorSpec

GATHER_BYTES = 2**29  # of parameters that ZeRO-3 holds gathered at a time


class Weight(NamedTuple):
    """One weight, of the first parameter's type and shape, and how it is made while all `parameters` are whole on this rank."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Of its parameters."""
        return sum(_spec(self.name, parameter).num_bytes for parameter in self.parameters)

    @property
    def spec(self) -> TensorSpec:
        """What is known before it is made."""
        return _spec(self.name, self.parameters[0])


def plain(name: str, parameter: nn.Parameter) -> Weight:
    """A weight that is a parameter itself."""
    return Weight(name, (parameter,), lambda: parameter.data)


def full(model: nn.Module) -> list[Weight]:
    """The weights of a model, tied ones once."""
    return [plain(name, parameter) for name, parameter in model.named_parameters()]


class Export:
    """Names and tensors of `weights`, made anew at each pass; collective where `is_partitioned`: every rank must take them all.

    There, parameters are gathered in buckets of `GATHER_BYTES`: neither one by one nor the whole model at once. A tensor may be kept after
    the next one was taken: giving a parameter up leaves its gathered storage to whoever holds it.
    """

    def __init__(self, weights: Sequence[Weight], *, is_partitioned: bool) -> None:
        self._weights, self._is_partitioned = weights, is_partitioned

    @property
    def specs(self) -> list[TensorSpec]:
        """What a pass will give, in order; nothing is gathered for it."""
        return [weight.spec for weight in self._weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in cut(self._weights, GATHER_BYTES, lambda weight: weight.num_bytes):
            parameters = [parameter for weight in bucket for parameter in weight.parameters]
            context: Any = deepspeed.zero.GatheredParameters(parameters) if self._is_partitioned else nullcontext()
            with context:
                for weight in bucket:
                    yield weight.name, weight.make()


def _spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    # A partitioned parameter has no elements of its own; DeepSpeed keeps their shape beside it.
    return TensorSpec(name, parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
