"""AdamW inside DeepSpeed's wrappers, and the offload of its states to the host's memory between optimizer steps.

DeepSpeed has its own `offload_states`, but in 0.19 it refuses torch's AdamW under ZeRO-3, does not exist without ZeRO
or for bfloat16 at stage 1, and pins its memory again in every step at stage 2. This one does not depend on the stage:
it empties the storages of tensors and fills them again. Replacing the tensors would not free memory, because DeepSpeed
keeps views of them in many places; after the refill these views are valid again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_spec.contract import Device
from grpo_spec.parallelism import ParallelismConfig
from grpo_workload.policy.memory.host_memory import HostMemory, aligned, bytes_of, wait


def adam(deepspeed_engine: Any) -> Any:
    """Return the AdamW inside a DeepSpeed engine."""
    return getattr(deepspeed_engine.optimizer, "optimizer", deepspeed_engine.optimizer)


def uses_deepspeed_adam(parallelism: ParallelismConfig, device: Device) -> bool:
    """Whether to replace AdamW by DeepSpeed's for CPUs, which is faster there but needs a compiler at its first use."""
    return (
        parallelism.offload_optimizer == "cpu"
        and device == Device.CUDA
        and shutil.which(os.environ.get("CXX", "c++")) is not None
    )


def reset_step_counts(deepspeed_engine: Any) -> None:
    """Set AdamW's step counts to 0.

    DeepSpeed's optimizers for half precision allocate AdamW's moments by a step with gradients of 0, which one of them
    counts.
    """
    for state in adam(deepspeed_engine).state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


class OptimizerStates:
    """AdamW's moments and master weights: on the device within `on_device`, else in the host's memory.

    They arrive right before the optimizer's step and leave right after it, when there are no activations and a
    colocated vLLM engine sleeps. Besides weights and gradients, a device therefore never holds more than one of three:
    activations, these states, or vLLM's weights and KV cache.

    On the host they are whole tensors, so a checkpoint can be saved from there. To load one, they must be on the
    device.
    """

    def __init__(self, deepspeed_engine: Any) -> None:
        """Move the states of a DeepSpeed engine to the host, whose memory for them stays allocated."""
        self._deepspeed_engine, self._device = deepspeed_engine, torch.device(deepspeed_engine.device)
        self._memory = HostMemory(0, self._device)
        self._slots: list[_Slot] = []
        self._away: list[_Away] = []
        self.seconds = 0.0  # duration of the last move to the device and back
        self._put_away()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it, the states are on the device, and may be replaced."""
        start = time.perf_counter()
        self._bring_back()
        arrived = time.perf_counter()
        yield
        leaving = time.perf_counter()
        self._put_away()
        self.seconds = arrived - start + time.perf_counter() - leaving

    def _put_away(self) -> None:
        tensors, end = self._tensors(), 0
        for storage in {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values():
            self._slots.append(_Slot(storage, end, storage.nbytes()))
            end += aligned(storage.nbytes())
        if end > self._memory.bytes.nbytes:
            self._memory = HostMemory(0, self._device)  # the old one is freed before the new one is allocated
            self._memory = HostMemory(end, self._device)
        host = self._memory.bytes
        for slot in self._slots:
            slot.within(host).copy_(bytes_of(slot.storage), non_blocking=True)
        wait(self._device)
        # A storage of its own for each, since torch.save refuses one whose tensors are of several types.
        storages = {slot.storage._cdata: self._memory.storage(slot.start, slot.size) for slot in self._slots}
        for tensor in tensors:
            on_device = tensor.data
            storage = storages[tensor.untyped_storage()._cdata]
            values = torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            tensor.data = values
            self._away.append(_Away(tensor, on_device))
        for slot in self._slots:
            if slot.storage.resizable():  # on a CPU, storages read from a checkpoint cannot be
                slot.storage.resize_(0)

    def _bring_back(self) -> None:
        for slot in self._slots:
            if slot.storage.nbytes() < slot.size:
                slot.storage.resize_(slot.size)
            bytes_of(slot.storage).copy_(slot.within(self._memory.bytes), non_blocking=True)
        wait(self._device)
        for away in self._away:
            away.tensor.data = away.on_device
        self._slots, self._away = [], []

    def _tensors(self) -> list[Tensor]:
        """The tensors to move; neither weights that AdamW updates in place nor its step counts, which are scalars."""
        optimizer, weights = adam(self._deepspeed_engine), set()
        for parameter in self._deepspeed_engine.module.parameters():
            for tensor in (parameter.data, getattr(parameter, "ds_tensor", parameter.data)):
                weights.add(tensor.untyped_storage()._cdata)
        # Between steps, the optimizer's param_groups are empty under ZeRO-3; before the first step, its state may be.
        masters = [*optimizer.state, *(parameter for group in optimizer.param_groups for parameter in group["params"])]
        moments = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        distinct = {id(tensor): tensor for tensor in (*masters, *moments)}.values()
        return [tensor for tensor in distinct if tensor.untyped_storage()._cdata not in weights]


@dataclass(slots=True)
class _Slot:
    """A storage of the device, which is empty while its bytes are on the host."""

    storage: torch.UntypedStorage
    start: int  # offset on the host, in bytes
    size: int  # in bytes

    def within(self, host: Tensor) -> Tensor:
        """Return the part of the host's memory for this storage."""
        return host[self.start : self.start + self.size]


@dataclass(slots=True)
class _Away:
    """A tensor whose values are on the host for now."""

    tensor: Tensor
    on_device: Tensor  # its data on the device
