"""A model's full weights by name, as an engine or a checkpoint takes them, though ZeRO-3 keeps them in parts and LoRA in factors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import deepspeed
from torch import Tensor, nn

from grpo_workload.buckets import cut

GATHER_BYTES = 2**29  # of parameters that ZeRO-3 holds gathered at a time


class Weight(NamedTuple):
    """One weight, and how it is made while all of its `parameters` are whole on this rank."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Of its parameters."""
        # A partitioned parameter has no elements of its own; DeepSpeed keeps their number beside it.
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.parameters)


def plain(name: str, parameter: nn.Parameter) -> Weight:
    """A weight that is a parameter itself."""
    return Weight(name, (parameter,), lambda: parameter.data)


def full(model: nn.Module) -> list[Weight]:
    """The weights of a model, tied ones once."""
    return [plain(name, parameter) for name, parameter in model.named_parameters()]


def export(weights: Iterable[Weight], *, is_partitioned: bool) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of `weights`; collective where `is_partitioned`: every rank must take them all.

    There, parameters are gathered in buckets of `GATHER_BYTES`: neither one by one nor the whole model at once. A tensor may be kept after
    the next one was taken: giving a parameter up leaves its gathered storage to whoever holds it.
    """
    for bucket in cut(weights, GATHER_BYTES, lambda weight: weight.num_bytes):
        parameters = [parameter for weight in bucket for parameter in weight.parameters]
        context: Any = deepspeed.zero.GatheredParameters(parameters) if is_partitioned else nullcontext()
        with context:
            for weight in bucket:
                yield weight.name, weight.make()
