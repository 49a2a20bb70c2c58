"""Durations, curves, ranges and merged log lines as text."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.screen.log_lines import merged, read_line
from grpo_cli.screen.words import BARS, duration, ranges, since, some, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (45, "45s"), (192, "3m12s"), (7500, "2h05m"), (273_600, "3d4h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_since_reads_both_notations_of_the_api() -> None:
    now = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
    assert since("2026-01-01T00:00:00Z", now) == since("2026-01-01T00:00:00.000000+00:00", now) == 60
    assert since(None, now) is None


def test_a_sparkline_rises_and_leaves_gaps() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], 10) == "▁▅ █"
    assert sparkline([3.0, 3.0], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([None], 10) == ""
    assert sparkline([-1.7e308, 1e306, 1.7e308, 1.7e308], 4) == "▁▅██"


@given(st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(1, 60))
def test_a_sparkline_is_at_most_as_wide_as_requested(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= min(width, len(values))
    assert set(line) <= {*BARS, " "}


@given(st.sets(st.integers(0, 60)))
def test_ranges_contain_each_number_once(numbers: set[int]) -> None:
    spans = [part.split("-") for part in ranges(numbers).split(", ") if part]
    assert [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)] == sorted(numbers)


def test_some_counts_the_rest() -> None:
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"
    assert some(["a", "b"], 2) == "a, b"


def test_logs_are_merged_in_order_of_time_and_lines_know_their_rank() -> None:
    a = [read_line("a", raw) for raw in ("2026-01-01T00:00:00.5Z [rank 0] one", "2026-01-01T00:00:02.25Z launcher")]
    b = [read_line("b", raw) for raw in ("2026-01-01T00:00:00.45Z [rank 12] zero", "2026-01-01T00:00:02Z two")]

    lines = list(merged([a, b]))

    assert [(line.pod, line.rank, line.text) for line in lines] == [
        ("b", 12, "[rank 12] zero"),
        ("a", 0, "[rank 0] one"),
        ("b", None, "two"),
        ("a", None, "launcher"),
    ]


def test_a_line_without_a_time_has_the_time_of_the_line_before() -> None:
    first = read_line("a", "2026-01-01T00:00:00.5Z one")
    assert read_line("a", "no time here", first).time == first.time
    assert read_line("a", "unable to retrieve logs").text == "unable to retrieve logs"
