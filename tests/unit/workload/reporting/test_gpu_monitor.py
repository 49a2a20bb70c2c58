"""A thread that reads a device's state: mean and peak per step, and its end with the driver. Real GPUs: tests/gpu."""

import threading
from collections.abc import Iterator

from grpo_workload.reporting.gpu_monitor import Poller, Reading
from grpo_workload.reporting.rank_metrics import DeviceUse


class Driver:
    """Returns its readings one after the other; then it sets `spent`, and fails once `may_fail` is set."""

    def __init__(self, *readings: Reading) -> None:
        self.readings: Iterator[Reading] = iter(readings)
        self.spent, self.may_fail = threading.Event(), threading.Event()

    def __call__(self) -> Reading:
        for reading in self.readings:
            return reading
        self.spent.set()
        assert self.may_fail.wait(10)
        raise OSError("GPU is lost")


def test_a_step_has_its_mean_utilization_and_its_most_memory() -> None:
    driver = Driver(Reading(100.0, 5), Reading(50.0, 9), Reading(None, 7))
    poller = Poller(driver, interval=0.001)
    assert driver.spent.wait(10)
    assert poller.end() == DeviceUse(gpu_utilization=75.0, memory_used_peak=9)
    poller.begin()
    assert poller.end() == DeviceUse()
    driver.may_fail.set()
    poller.close()


def test_a_driver_that_fails_ends_the_thread_and_not_the_rank() -> None:
    driver = Driver(Reading(20.0, 1))
    driver.may_fail.set()
    poller = Poller(driver, interval=0.001)
    assert driver.spent.wait(10)
    poller.close()
    assert poller.end() == DeviceUse(gpu_utilization=20.0, memory_used_peak=1)
