"""Looking at a device from a thread; the real one is in tests/gpu."""

import threading
from collections.abc import Iterator

from grpo_workload.device_use import Look, Sampler
from grpo_workload.rank_metrics import DeviceUse


class Driver:
    """Tells `looks` one after the other, then nothing more; `spent` is set when it is asked beyond them."""

    def __init__(self, *looks: Look) -> None:
        self.looks: Iterator[Look] = iter(looks)
        self.spent, self.may_fail = threading.Event(), threading.Event()

    def __call__(self) -> Look:
        for look in self.looks:
            return look
        self.spent.set()
        assert self.may_fail.wait(10)
        raise OSError("GPU is lost")


def test_the_mean_utilization_and_the_most_memory_of_a_step() -> None:
    driver = Driver(Look(100.0, 5), Look(50.0, 9), Look(None, 7))
    sampler = Sampler(driver, interval=0.001)
    assert driver.spent.wait(10)
    assert sampler.end() == DeviceUse(gpu_utilization=75.0, memory_used_peak=9)
    sampler.begin()
    assert sampler.end() == DeviceUse()
    driver.may_fail.set()
    sampler.close()


def test_a_driver_that_fails_ends_the_looking_and_not_the_rank() -> None:
    driver = Driver(Look(20.0, 1))
    driver.may_fail.set()
    sampler = Sampler(driver, interval=0.001)
    assert driver.spent.wait(10)
    sampler.close()
    assert sampler.end() == DeviceUse(gpu_utilization=20.0, memory_used_peak=1)
