"""AdamW inside of whatever DeepSpeed has put around it, and its states in the host's memory while nobody needs them.

DeepSpeed has an `offload_states` of its own, which 0.19 refuses for torch's AdamW under ZeRO-3, does not have without ZeRO nor for bfloat16
at stage 1, and which pins its memory anew in every step at stage 2. This one works under all of them, since it knows nothing of stages: it
empties the storages of tensors. Views of them, which DeepSpeed keeps in many places, would hold the memory of tensors that are replaced;
of a storage that is filled again they are as they were.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_workload.config import ParallelismConfig
from grpo_workload.contract import Device


def adam(engine: Any) -> Any:
    """The AdamW of a DeepSpeed engine."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def uses_deepspeed_adam(parallelism: ParallelismConfig, device: Device) -> bool:
    """Whether accelerate is to replace AdamW by DeepSpeed's for CPUs: it is faster there, but is compiled when it is first used."""
    return parallelism.offload_optimizer == "cpu" and device == Device.CUDA and shutil.which(os.environ.get("CXX", "c++")) is not None


def forget_steps(engine: Any) -> None:
    """DeepSpeed's optimizers for half precision take a step with gradients of 0 to allocate AdamW's moments; one of them lets it count."""
    for state in adam(engine).state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


ALIGNMENT = 512
"""Bytes that places of tensors on the host are multiples of, as on devices."""


class OptimizerStates:
    """AdamW's moments, and the copies of the weights that it updates: on the device within `on_device`, else in the host's memory.

    They come right before the optimizer's step and go right after it. At that time there are no activations, and a colocated engine
    sleeps. So the most that a device holds is the largest of three, not their sum: beside weights, and gradients of which DeepSpeed keeps
    some all the time, it is either activations, or these states, or the engine's weights and its cache.

    On the host they are whole tensors: a checkpoint can be saved from there. While one is loaded, they have to be on the device.
    """

    def __init__(self, engine: Any) -> None:
        """Move the states of a DeepSpeed engine away; the host's memory for them is kept."""
        self._engine, self._device = engine, torch.device(engine.device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._slots: list[_Slot] = []
        self._away: list[_Away] = []
        self._give_up: Callable[[], Any] = lambda: None
        self.seconds = 0.0  # that the last way to the device and back took
        self._put_away()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it the states are on the device, and may be replaced."""
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
            end += math.ceil(storage.nbytes() / ALIGNMENT) * ALIGNMENT
        if end > self._host.nbytes:
            self._make_room(end)
        for slot in self._slots:
            slot.within(self._host).copy_(_bytes(slot.storage), non_blocking=True)
        _wait(self._device)
        starts = {slot.storage._cdata: slot.start for slot in self._slots}
        for tensor in tensors:
            on_device = tensor.data
            offset = starts[tensor.untyped_storage()._cdata] // tensor.itemsize + tensor.storage_offset()
            values = torch.empty(0, dtype=tensor.dtype).set_(self._host.untyped_storage(), offset, tensor.size(), tensor.stride())
            tensor.data = values
            self._away.append(_Away(tensor, on_device))
        for slot in self._slots:
            if slot.storage.resizable():  # all but what ranks on CPUs have read from a checkpoint
                slot.storage.resize_(0)

    def _make_room(self, size: int) -> None:
        """Have `size` bytes on the host, in place of what there was."""
        self._host = torch.empty(0, dtype=torch.uint8)
        self._give_up()
        self._host = torch.empty(size, dtype=torch.uint8)
        if self._device.type == "cuda":
            _register(self._host)
            self._give_up = weakref.finalize(self, _unregister, self._host)  # memory that is freed while registered cannot be again

    def _bring_back(self) -> None:
        for slot in self._slots:
            if slot.storage.nbytes() < slot.size:
                slot.storage.resize_(slot.size)
            _bytes(slot.storage).copy_(slot.within(self._host), non_blocking=True)
        _wait(self._device)
        for away in self._away:
            away.tensor.data = away.on_device
        self._slots, self._away = [], []

    def _tensors(self) -> list[Tensor]:
        """What is to be moved: not weights that AdamW updates in place, and not its steps, which are numbers."""
        optimizer, weights = adam(self._engine), set()
        for parameter in self._engine.module.parameters():
            for tensor in (parameter.data, getattr(parameter, "ds_tensor", parameter.data)):
                weights.add(tensor.untyped_storage()._cdata)
        # Under ZeRO-3 the optimizer's groups are empty between steps; before the first step, its state may be.
        masters = [*optimizer.state, *(parameter for group in optimizer.param_groups for parameter in group["params"])]
        moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        distinct = {id(tensor): tensor for tensor in (*masters, *moments)}.values()
        return [tensor for tensor in distinct if tensor.untyped_storage()._cdata not in weights]


@dataclass(slots=True)
class _Slot:
    """A storage of the device, empty while its bytes are on the host from `start`."""

    storage: torch.UntypedStorage
    start: int
    size: int

    def within(self, host: Tensor) -> Tensor:
        """Its bytes there."""
        return host[self.start : self.start + self.size]


@dataclass(slots=True)
class _Away:
    """A tensor that has its values on the host, and what it has on the device."""

    tensor: Tensor
    on_device: Tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _register(host: Tensor) -> None:
    """Let CUDA copy these bytes of the host's memory at full speed: torch's own allocator would round them up to a power of 2."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # of torch itself
    torch.cuda.check_error(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))


def _unregister(host: Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostUnregister(host.data_ptr()))


def _wait(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()
