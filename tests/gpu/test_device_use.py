"""Utilization, memory and dtypes that NVML and torch report for a GPU."""

import time

import torch

from grpo_spec.contract import Device
from grpo_workload.policy.model.dtype_support import check_precision, own_support
from grpo_workload.reporting.gpu_monitor import open_monitor

GIB = 2**30


def test_a_busy_step_is_measured_and_does_not_count_in_the_next():
    device = torch.device("cuda", 0)
    matrix = torch.randn(8192, 8192, device=device)
    before = torch.cuda.memory_allocated(device)  # other tests may have left something
    monitor = open_monitor(device)
    monitor.begin()
    held = torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()
    busy = monitor.end()
    assert busy.gpu_utilization > 50
    assert before + 2 * GIB <= busy.memory_allocated_peak <= busy.memory_reserved_peak <= busy.memory_used_peak
    del held
    monitor.begin()
    assert monitor.end().memory_allocated_peak < before + 2 * GIB
    monitor.close()


def test_dtypes_that_the_gpu_supports():
    support = own_support(0, Device.CUDA)
    assert torch.cuda.get_device_name() in support.device
    check_precision("float32", [support])
    if torch.cuda.get_device_capability() >= (8, 0):
        assert support.dtypes == ("bfloat16", "float16", "float32")
