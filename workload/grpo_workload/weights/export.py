"""A model's full weights by name, as engines and checkpoints need them.

ZeRO-3 keeps weights in parts and LoRA keeps them in factors; both are put together here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager

from grpo_workload.weights.buckets import cut
from grpo_workload.weights.wire import TensorSpec

GATHER_BYTES = 2**28
"""Bytes of partitioned parameters that are gathered at a time. Two such buckets are held: one in use and the next."""


class Weight(NamedTuple):
    """One weight to export. It has the type and shape of the first of its `parameters`, before quantization.

    `make` computes it from the data of all of them.
    """

    name: str
    parameters: tuple[Tensor, ...]  # or buffers
    make: Callable[..., Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of all its parameters in bytes."""
        return sum(_spec(self.name, parameter).num_bytes for parameter in self.parameters)

    @property
    def spec(self) -> TensorSpec:
        """Its name, type and shape, known without computing it."""
        return _spec(self.name, self.parameters[0])


class WeightGroup(NamedTuple):
    """Weights that are exported together. `convert` computes what `specs` describes from the values of all of them.

    Without it, the one weight is given as it is, under the name of its spec.
    """

    weights: tuple[Weight, ...]
    specs: tuple[TensorSpec, ...]
    convert: Callable[..., Sequence[Tensor]] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all its weights, in order."""
        return [parameter for weight in self.weights for parameter in weight.parameters]

    @property
    def num_bytes(self) -> int:
        """Size of all its parameters in bytes."""
        return sum(weight.num_bytes for weight in self.weights)

    def make(self, values: Iterator[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; takes the values of its parameters, in order."""
        made: Sequence[Tensor] = [weight.make(*islice(values, len(weight.parameters))) for weight in self.weights]
        if self.convert is not None:
            made = self.convert(*made)
        for spec, tensor in zip(self.specs, made, strict=True):
            yield spec.name, tensor


def plain(name: str, parameter: Tensor) -> Weight:
    """Return the weight that is just the parameter itself."""
    return Weight(name, (parameter,), values_of(parameter))


def values_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what computes a parameter's values from its data: the data itself, unless it has 4 bits for each value."""
    if (state := getattr(parameter, "quant_state", None)) is None:
        return lambda data: data
    from bitsandbytes.functional import dequantize_4bit

    return partial(dequantize_4bit, quant_state=state)


def full(model: nn.Module) -> list[Weight]:
    """Return the weights of a model, and the buffers that checkpoints hold; tied weights appear once."""
    saved = model.state_dict(keep_vars=True).keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return [plain(name, tensor) for name, tensor in [*model.named_parameters(), *buffers]]


def alone(weights: Sequence[Weight]) -> list[WeightGroup]:
    """Return each weight as it is."""
    return [WeightGroup((weight,), (weight.spec,)) for weight in weights]


class Export:
    """Iterate over names and tensors of `weights`, converted by `group`; each iteration computes them again.

    With `is_partitioned` (ZeRO-3) iterating is collective: every rank must iterate to the end. Parameters are then
    gathered in buckets of `GATHER_BYTES`, each while the previous one is used. Tensors stay valid after the next one is
    taken. The parameters themselves do not change.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        is_partitioned: bool,
        group: Callable[[Sequence[Weight]], list[WeightGroup]] = alone,
    ) -> None:
        self._groups, self._is_partitioned = group(weights), is_partitioned

    @property
    def specs(self) -> list[TensorSpec]:
        """Description of each tensor, in order. Gathers nothing."""
        return [spec for group in self._groups for spec in group.specs]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self._is_partitioned:
            for group in self._groups:
                yield from group.make(parameter.data for parameter in group.parameters)
            return
        buckets = map(_Bucket, cut(self._groups, GATHER_BYTES, lambda group: group.num_bytes))
        for bucket, _ in pairwise(chain(buckets, [None])):  # creating the next bucket starts to gather it
            assert bucket is not None
            yield from bucket.take()


class _Bucket:
    """Weights whose parameters ZeRO-3 keeps in parts. Creating the bucket starts to gather them.

    DeepSpeed's `GatheredParameters` is not used: it gathers parameters one by one and waits until the device is idle.
    """

    def __init__(self, groups: Sequence[WeightGroup]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._groups = groups
        parameters: list[Any] = [parameter for group in groups for parameter in group.parameters]
        # DeepSpeed does not partition small parameters and buffers: every rank has them already.
        there = ZeroParamStatus.AVAILABLE
        partitioned = [parameter for parameter in parameters if getattr(parameter, "ds_status", there) != there]
        gathered: dict[int, Tensor] = {}
        self._gathering: Any = None
        if partitioned:
            group = partitioned[0].ds_process_group
            with _coalescing_manager(group=group, async_ops=True) as self._gathering:
                for parameter in partitioned:
                    part = parameter.ds_tensor
                    parts = torch.empty(dist.get_world_size(group) * len(part), dtype=part.dtype, device=part.device)
                    _all_gather(parts, part, group=group)
                    unpadded = parts[: parameter.ds_numel]  # the last part is padded
                    gathered[id(parameter)] = unpadded.view(parameter.ds_shape)
        self._values = [gathered.get(id(parameter), parameter.data) for parameter in parameters]

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Wait until the weights are gathered and yield them. Only once."""
        if self._gathering is not None:
            self._gathering.wait()
        values = iter(self._values)
        self._gathering, self._values = None, []
        for group in self._groups:
            yield from group.make(values)


# The first name exists since PyTorch 2.13. `_coalescing_manager` is private: no public call gathers several tensors.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _spec(name: str, parameter: Tensor) -> TensorSpec:
    # A partitioned parameter is itself empty; DeepSpeed keeps the full shape in `ds_shape`. Data of 4 bits are packed
    # into bytes; bitsandbytes keeps the values' type and shape in `quant_state`.
    values = getattr(parameter, "quant_state", None) or parameter
    return TensorSpec(name, values.dtype, tuple(getattr(parameter, "ds_shape", values.shape)))
