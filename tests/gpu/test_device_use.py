"""What NVML and torch tell of a GPU that works."""

import time

import pytest
import torch

from grpo_workload.contract import Device
from grpo_workload.device_use import open_monitor
from grpo_workload.precision import check_precision, own_support

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GIB = 2**30


def test_a_busy_gpu_is_seen_and_an_idle_step_is_told_apart():
    device = torch.device("cuda", 0)
    matrix = torch.randn(8192, 8192, device=device)
    monitor = open_monitor(device)
    monitor.begin()
    held = torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()
    busy = monitor.end()
    assert busy.gpu_utilization is not None
    assert busy.gpu_utilization > 50
    assert busy.memory_allocated_peak is not None
    assert 2 * GIB <= busy.memory_allocated_peak <= (busy.memory_reserved_peak or 0) <= (busy.memory_used_peak or 0)
    del held
    monitor.begin()
    assert (monitor.end().memory_allocated_peak or 0) < 2 * GIB
    monitor.close()


def test_what_the_gpu_computes_in():
    support = own_support(0, Device.CUDA)
    assert torch.cuda.get_device_name() in support.device
    check_precision("float32", [support])
    if torch.cuda.get_device_capability() >= (8, 0):
        assert support.dtypes == ("bfloat16", "float16", "float32")
