"""A rank's use of its GPU, from NVML, which a thread reads five times a second, and torch's own counters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple, Protocol

import torch

from grpo_workload.reporting.rank_metrics import DeviceUse

INTERVAL = 0.2
"""Seconds between two readings: the driver's utilization covers the last 1/6 s to 1 s, depending on the GPU."""
CLOSING = 5.0
"""Seconds to wait for the last reading."""

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """State of a device at one moment, from its driver."""

    utilization: float | None  # percent; None if the device does not report it, as a MIG slice does not
    memory_used: int  # bytes, by all processes


class Monitor(Protocol):
    """Measures how a rank uses its device in each step."""

    def begin(self) -> None:
        """Begin a step."""
        ...

    def end(self) -> DeviceUse:
        """Return how the device was used since `begin`."""
        ...

    def close(self) -> None:
        """Stop measuring."""
        ...


class NoMonitor:
    """Monitor of a rank on a CPU, which measures nothing."""

    def begin(self) -> None: ...

    def end(self) -> DeviceUse:
        """Return a record without values."""
        return DeviceUse()

    def close(self) -> None: ...


class Poller:
    """Reads a device's state in its own thread."""

    def __init__(self, read: Callable[[], Reading], *, interval: float = INTERVAL) -> None:
        """Start the thread. It ends when `read` raises OSError; the rank goes on without readings."""
        self._read, self._interval = read, interval
        self._readings: list[Reading] = []
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="device-use", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Drop earlier readings."""
        with self._lock:
            self._readings = []

    def end(self) -> DeviceUse:
        """Return the mean utilization and the most memory used since `begin`."""
        with self._lock:
            readings = self._readings
        utilization = [reading.utilization for reading in readings if reading.utilization is not None]
        return DeviceUse(
            gpu_utilization=fmean(utilization) if utilization else None,
            memory_used_peak=max((reading.memory_used for reading in readings), default=None),
        )

    def close(self) -> None:
        """End the thread; give up if it hangs in the driver."""
        self._closed.set()
        self._thread.join(CLOSING)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                reading = self._read()
            except OSError as error:
                logger.warning("metrics will lack this rank's GPU utilization and memory: NVML failed: %s", error)
                return
            with self._lock:
                self._readings.append(reading)
            self._closed.wait(self._interval)


class CudaMonitor:
    """Monitor of a CUDA device: torch's count of this process's memory, and NVML's readings of the whole device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        read = nvml_reader(device)
        self._poller: Monitor = NoMonitor() if read is None else Poller(read)

    def begin(self) -> None:
        """See `Monitor.begin`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._poller.begin()

    def end(self) -> DeviceUse:
        """See `Monitor.end`."""
        polled = self._poller.end()
        return DeviceUse(
            gpu_utilization=polled.gpu_utilization,
            memory_used_peak=polled.memory_used_peak,
            memory_allocated_peak=torch.cuda.max_memory_allocated(self._device),
            memory_reserved_peak=torch.cuda.max_memory_reserved(self._device),
        )

    def close(self) -> None:
        """See `Monitor.close`."""
        self._poller.close()


def open_monitor(device: torch.device) -> Monitor:
    """Return the monitor of a rank's device."""
    return CudaMonitor(device) if device.type == "cuda" else NoMonitor()


def nvml_reader(device: torch.device) -> Callable[[], Reading] | None:
    """Return a function that reads a CUDA device through NVML; None, with a warning, if the container has no NVML."""
    try:
        import pynvml  # from the extra `gpu`
    except ImportError:
        logger.warning("metrics will lack GPU utilization: nvidia-ml-py is not in the image")
        return None
    try:
        pynvml.nvmlInit()
        # By UUID, since NVML numbers all devices of the machine and torch those in CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        logger.warning(
            "metrics will lack GPU utilization: NVML says %s; is `utility` in NVIDIA_DRIVER_CAPABILITIES?", error
        )
        return None

    def read() -> Reading:
        try:
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            try:
                return Reading(float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), memory)
            except pynvml.NVMLError_NotSupported:
                return Reading(None, memory)
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error

    return read
