"""The load of processor and GPUs while a job takes its measured steps."""

from __future__ import annotations

import os
from statistics import fmean
from typing import Any

import psutil


class Busy:
    """Readings of the cores that this process may use, and of its GPUs, since step `warmup`."""

    def __init__(self, device: str, warmup: int) -> None:
        self._warmup = warmup
        self._cores: list[float] = []
        self._gpus: list[list[float]] = []
        self._handles = gpu_handles() if device == "cuda" else []
        psutil.cpu_percent(percpu=True)  # the next call counts from here

    def look(self, steps: int) -> None:
        """Take a reading if so many finished `steps` are after the warmup; call it a few times a second."""
        shares = psutil.cpu_percent(percpu=True)
        if steps >= self._warmup:
            self._cores.append(sum(shares[core] for core in os.sched_getaffinity(0)) / 100)
            self._gpus.append([utilization(handle) for handle in self._handles])

    def means(self) -> dict[str, Any]:
        """Return the mean number of busy cores, and for each GPU the share of time in which it ran a kernel."""
        return {
            "cores": round(fmean(self._cores or [0.0]), 2),
            "gpus": [round(fmean(shares), 3) for shares in zip(*self._gpus, strict=True)],
            "readings": len(self._cores),
        }


def gpu_names() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    import pynvml

    return [str(pynvml.nvmlDeviceGetName(handle)) for handle in gpu_handles()]


def gpu_number(place: int) -> str:
    """Return the number that the host gives this process's GPU `place`, for a child that is to have no other."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[place] if given else str(place)


def gpu_handles() -> list[Any]:
    """Return NVML's handles of the GPUs that this process may use."""
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = map(int, visible.split(",")) if visible else range(pynvml.nvmlDeviceGetCount())
    return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]


def utilization(handle: Any) -> float:
    """Return the share of the last moment, 1 s at most, in which a GPU ran any kernel."""
    import pynvml

    return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
