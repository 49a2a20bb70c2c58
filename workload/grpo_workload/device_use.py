"""How much of its GPU a rank uses: NVML, asked by a thread a few times a second, and what torch counts itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple, Protocol

import torch

from grpo_workload.rank_metrics import DeviceUse

INTERVAL = 0.2
"""Seconds between two looks: the driver's own figure is of the last sixth of a second to a second."""
CLOSING = 5.0
"""Seconds that are waited for the last look."""

logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What a driver says of a device at one time."""

    utilization: float | None  # percent; None where the device does not tell, as a MIG slice
    memory_used: int  # bytes, by whatever process


class Monitor(Protocol):
    """How a rank's device is used, step by step."""

    def begin(self) -> None:
        """A step begins."""
        ...

    def end(self) -> DeviceUse:
        """The step has ended: how the device was used since it began."""
        ...

    def close(self) -> None:
        """No step will follow."""
        ...


class NoMonitor:
    """Of a CPU."""

    def begin(self) -> None: ...

    def end(self) -> DeviceUse:
        """Nothing is known."""
        return DeviceUse()

    def close(self) -> None: ...


class Sampler:
    """Looks at a device from a thread of its own."""

    def __init__(self, look: Callable[[], Look], *, interval: float = INTERVAL) -> None:
        """`look` raises OSError when there is nothing more to see; the rank goes on without."""
        self._look, self._interval = look, interval
        self._looks: list[Look] = []
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="device-use", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget what was seen."""
        with self._lock:
            self._looks = []

    def end(self) -> DeviceUse:
        """What was seen since `begin`."""
        with self._lock:
            looks = self._looks
        utilization = [look.utilization for look in looks if look.utilization is not None]
        return DeviceUse(
            gpu_utilization=fmean(utilization) if utilization else None,
            memory_used_peak=max((look.memory_used for look in looks), default=None),
        )

    def close(self) -> None:
        """End the thread, unless the driver keeps it."""
        self._closed.set()
        self._thread.join(CLOSING)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                seen = self._look()
            except OSError as error:
                logger.warning("the driver tells no more of this rank's GPU: %s", error)
                return
            with self._lock:
                self._looks.append(seen)
            self._closed.wait(self._interval)


class CudaMonitor:
    """Of this rank's CUDA device: torch's own count of its memory, and what NVML tells of the whole device, where it does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        look = nvml_look(device)
        self._sampler: Monitor = NoMonitor() if look is None else Sampler(look)

    def begin(self) -> None:
        """See `Monitor.begin`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._sampler.begin()

    def end(self) -> DeviceUse:
        """See `Monitor.end`."""
        seen = self._sampler.end()
        return DeviceUse(
            gpu_utilization=seen.gpu_utilization,
            memory_used_peak=seen.memory_used_peak,
            memory_allocated_peak=torch.cuda.max_memory_allocated(self._device),
            memory_reserved_peak=torch.cuda.max_memory_reserved(self._device),
        )

    def close(self) -> None:
        """See `Monitor.close`."""
        self._sampler.close()


def open_monitor(device: torch.device) -> Monitor:
    """The monitor of a rank's device."""
    return CudaMonitor(device) if device.type == "cuda" else NoMonitor()


def nvml_look(device: torch.device) -> Callable[[], Look] | None:
    """Look at a CUDA device through NVML; None, and a warning, where the container has no NVML for it."""
    try:
        import pynvml  # of the extra gpu
    except ImportError:
        logger.warning("metrics tell no GPU utilization: nvidia-ml-py is not in the image")
        return None
    try:
        pynvml.nvmlInit()
        # By UUID: NVML counts all devices of the machine, torch those of CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        logger.warning("metrics tell no GPU utilization: NVML says %s; is `utility` in NVIDIA_DRIVER_CAPABILITIES?", error)
        return None

    def look() -> Look:
        try:
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            try:
                return Look(float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), memory)
            except pynvml.NVMLError_NotSupported:
                return Look(None, memory)
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error

    return look
