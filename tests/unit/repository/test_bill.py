"""Asserts that the benchmark of the bill compares both sides over the same time, and each second with its phase."""

from benchmarks.training.bill import Seen, compare

from grpo_spec.reports import GpuUse

PHASES = ((0.0, "Generating"), (4.0, "Rewarding"), (5.0, "Training"))


def test_both_sides_are_counted_between_two_steps() -> None:
    """Two steps of 10 s: 4 s of sampling, a second for rewards, 5 s of training, in which the GPU is 90% busy."""
    phases = [(100.0 + 10 * step + after, name) for step in range(3) for after, name in PHASES]
    uses = {step: GpuUse(training=5.0 * step, sampling=4.0 * step, waiting=1.0 * step) for step in range(1, 4)}
    shares = [1.0] * 8 + [0.0] * 2 + [0.9] * 10  # of half a second each
    readings = [(100.0, 0.5)] + [(100.5 + 0.5 * look, shares[look % 20]) for look in range(60)]
    seen = Seen({step: (100.0 + 10 * step, use) for step, use in uses.items()}, phases, readings)
    found = compare(seen, 1, 3)
    assert found["window_seconds"] == 20
    assert found["said"] == {"training": 10, "sampling": 8, "waiting": 2}
    assert found["nvml_busy_seconds"] == 2 * (4 + 0.9 * 5)
    assert found["ratio"] == round(18 / 17, 4)
    assert found["phases"] == {
        "Generating": {"seconds": 8, "nvml_busy_seconds": 8},
        "Rewarding": {"seconds": 2, "nvml_busy_seconds": 0},
        "Training": {"seconds": 10, "nvml_busy_seconds": 9},
    }
    assert found["busy_percent_by_second"][3:6] == [100, 50, 45]


def test_without_nvml_there_is_no_ratio() -> None:
    seen = Seen({1: (0.0, GpuUse()), 2: (10.0, GpuUse(training=5.0))}, [(0.0, "Training")], [])
    found = compare(seen, 1, 2)
    assert (found["ratio"], found["nvml_busy_seconds"], found["busy_percent_by_second"]) == (None, None, [])
    assert found["phases"] == {"Training": {"seconds": 10, "nvml_busy_seconds": None}}
