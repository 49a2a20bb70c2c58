"""The line that says how long a job has held GPUs, and what for."""

from grpo_cli.screen.bill import describe_usage
from grpo_operator.api.usage_status import Usage
from support.control_plane.jobs import NOW


def test_the_line_has_the_sum_and_the_parts_that_are_worth_a_percent() -> None:
    parts = {"training": 3600, "sampling": 3000, "waiting": 0, "loading": 570, "lost": 10, "idle": 20}
    said = describe_usage(Usage(gpu_seconds={"held": 7200} | parts, time=NOW))
    assert said == "2.0 GPU hours: 50% training, 42% sampling, 8% loading"
    priced = describe_usage(Usage(gpu_seconds={"held": 7200} | parts, time=NOW), (2.5, "EUR"))
    assert priced.startswith("2.0 GPU hours for 5.00 EUR: ")
    for held, shown in ((20, "20 GPU seconds"), (60, "1 GPU minute"), (600, "10 GPU minutes")):
        loaded = Usage(gpu_seconds={"held": held, "loading": held}, time=NOW)
        assert describe_usage(loaded) == f"{shown}: 100% loading"


def test_a_job_that_has_held_none_has_no_line() -> None:
    assert describe_usage(None) == ""
    assert describe_usage(Usage(gpu_seconds={"held": 0}, time=NOW)) == ""
