"""A model's full weights by name, as an engine or a checkpoint takes them, though ZeRO-3 keeps them in parts and LoRA in factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager

from grpo_workload.buckets import cut
from grpo_workload.packing import TensorSpec

# Of parameters that ZeRO-3 gathers at a time. Two are held: one in use, and the next.
GATHER_BYTES = 2**28


class Weight(NamedTuple):
    """One weight, of the first parameter's type and shape, and how it is made of the values of all `parameters`."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    make: Callable[..., Tensor]

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
    return Weight(name, (parameter,), lambda value: value)


def full(model: nn.Module) -> list[Weight]:
    """The weights of a model, tied ones once."""
    return [plain(name, parameter) for name, parameter in model.named_parameters()]


class Export:
    """Names and tensors of `weights`, made anew at each pass; collective where `is_partitioned`: every rank must take them all.

    There, parameters are gathered in buckets of `GATHER_BYTES`, each while the one before it is used. A tensor may be kept after the next
    one was taken; the parameters themselves stay as they are.
    """

    def __init__(self, weights: Sequence[Weight], *, is_partitioned: bool) -> None:
        self._weights, self._is_partitioned = weights, is_partitioned

    @property
    def specs(self) -> list[TensorSpec]:
        """What a pass will give, in order; nothing is gathered for it."""
        return [weight.spec for weight in self._weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self._is_partitioned:
            for weight in self._weights:
                yield weight.name, weight.make(*(parameter.data for parameter in weight.parameters))
            return
        buckets = map(_Bucket, cut(self._weights, GATHER_BYTES, lambda weight: weight.num_bytes))
        for bucket, _ in pairwise(chain(buckets, [None])):  # the other one has begun to be gathered
            assert bucket is not None
            yield from bucket.take()


class _Bucket:
    """Weights whose parameters ZeRO-3 keeps in parts, being gathered from its beginning.

    Not by DeepSpeed's `GatheredParameters`, which gathers one parameter after the other and waits for all that the device does.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._weights = weights
        parameters: list[Any] = [parameter for weight in weights for parameter in weight.parameters]
        # Others are whole on every rank: DeepSpeed does not cut small ones.
        apart = [parameter for parameter in parameters if parameter.ds_status != ZeroParamStatus.AVAILABLE]
        whole: dict[int, Tensor] = {}
        self._gathering: Any = None
        if apart:
            group = apart[0].ds_process_group
            with _coalescing_manager(group=group, async_ops=True) as self._gathering:
                for parameter in apart:
                    part = parameter.ds_tensor
                    parts = torch.empty(dist.get_world_size(group) * len(part), dtype=part.dtype, device=part.device)
                    _all_gather(parts, part, group=group)
                    whole[id(parameter)] = parts[: parameter.ds_numel].view(parameter.ds_shape)  # the last part is padded
        self._values = [whole.get(id(parameter), parameter.data) for parameter in parameters]

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for them; once."""
        if self._gathering is not None:
            self._gathering.wait()
        values = iter(self._values)
        self._gathering, self._values = None, []
        for weight in self._weights:
            yield weight.name, weight.make(*islice(values, len(weight.parameters)))


# PyTorch's name for it since 2.13, or before. None of its public calls gathers several tensors at once, as those of `_coalescing_manager`.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    # A partitioned parameter has no elements of its own; DeepSpeed keeps their shape beside it.
    return TensorSpec(name, parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
