"""A model's full weights by name, as engines and checkpoints need them.

ZeRO-3 keeps weights in parts and LoRA keeps them in factors; both are put together here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """One weight to export. It has the type and shape of the first of its `parameters`.

    `make` computes it from the values of all of them.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    make: Callable[..., Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of all its parameters in bytes."""
        return sum(_spec(self.name, parameter).num_bytes for parameter in self.parameters)

    @property
    def spec(self) -> TensorSpec:
        """Its name, type and shape, known without computing it."""
        return _spec(self.name, self.parameters[0])


def plain(name: str, parameter: nn.Parameter) -> Weight:
    """Return the weight that is just the parameter itself."""
    return Weight(name, (parameter,), lambda value: value)


def full(model: nn.Module) -> list[Weight]:
    """Return the weights of a model; tied weights appear once."""
    return [plain(name, parameter) for name, parameter in model.named_parameters()]


class Export:
    """Iterate over names and tensors of `weights`; each iteration computes them again.

    With `is_partitioned` (ZeRO-3) iterating is collective: every rank must iterate to the end. Parameters are then
    gathered in buckets of `GATHER_BYTES`, each while the previous one is used. Tensors stay valid after the next one is
    taken. The parameters themselves do not change.
    """

    def __init__(self, weights: Sequence[Weight], *, is_partitioned: bool) -> None:
        self._weights, self._is_partitioned = weights, is_partitioned

    @property
    def specs(self) -> list[TensorSpec]:
        """Description of each weight, in order. Gathers nothing."""
        return [weight.spec for weight in self._weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self._is_partitioned:
            for weight in self._weights:
                yield weight.name, weight.make(*(parameter.data for parameter in weight.parameters))
            return
        buckets = map(_Bucket, cut(self._weights, GATHER_BYTES, lambda weight: weight.num_bytes))
        for bucket, _ in pairwise(chain(buckets, [None])):  # creating the next bucket starts to gather it
            assert bucket is not None
            yield from bucket.take()


class _Bucket:
    """Weights whose parameters ZeRO-3 keeps in parts. Creating the bucket starts to gather them.

    DeepSpeed's `GatheredParameters` is not used: it gathers parameters one by one and waits until the device is idle.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._weights = weights
        parameters: list[Any] = [parameter for weight in weights for parameter in weight.parameters]
        # DeepSpeed does not partition small parameters: every rank has them already.
        partitioned = [parameter for parameter in parameters if parameter.ds_status != ZeroParamStatus.AVAILABLE]
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
        for weight in self._weights:
            yield weight.name, weight.make(*islice(values, len(weight.parameters)))


# The first name exists since PyTorch 2.13. `_coalescing_manager` is private: no public call gathers several tensors.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    # A partitioned parameter is itself empty; DeepSpeed keeps the full shape in `ds_shape`.
    return TensorSpec(name, parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
