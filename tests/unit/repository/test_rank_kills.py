"""The benchmark of killed ranks reads the parts of a recovery from the log of a trainer pod."""

from datetime import datetime

import pytest
from benchmarks.training.rank_kills import as_table, recovery


def rank_line(second: float, part: str, took: float, since: float) -> str:
    head = f"[rank 0] 2026-11-28 01:00:{second:02.0f},000 rank 0 INFO grpo_workload.reporting.start_log: "
    return f"{head}start: {part} took {took:.2f} s; {since:.2f} s since the process began\n"


START = rank_line(5, "programs", 4, 4) + rank_line(15, "engines", 10, 14)
FIRST = START + rank_line(20, "first step", 5, 19)
KILLED = datetime(2026, 11, 28, 1, 0, 30).timestamp()  # logs have the machine's own zone
SEEN = "2026-11-28 01:00:31,500 INFO grpo_workload.pod.run_once: ended with RankFailed: rank 0 was killed by SIGKILL\n"
AGAIN = rank_line(36, "programs", 3.5, 3.5) + rank_line(38, "states", 2, 5.5) + rank_line(39, "engines", 1, 6.5)
STEP = rank_line(41, "first step", 2, 8.5)


def test_a_recovery_begins_with_the_kill_and_ends_with_the_next_step() -> None:
    assert recovery(FIRST + SEEN + AGAIN, KILLED) is None
    parts = {"seen": 1.5, "restart": 1.0, "programs": 3.5, "states": 2.0, "engines": 1.0, "first step": 2.0}
    assert recovery(FIRST + SEEN + AGAIN + STEP, KILLED) == parts | {"total": 11.0}


def test_the_start_has_no_kill() -> None:
    assert recovery(START, None) is None
    assert recovery(FIRST + SEEN, None) == {"programs": 4.0, "engines": 10.0, "first step": 5.0, "total": 19.0}


@pytest.mark.parametrize(("kills", "middle", "late"), [(1, "11.00", "11.00"), (20, "20.50", "29.00")])
def test_the_table_has_medians_and_95th_percentiles(kills: int, middle: str, late: str) -> None:
    lines = [{"kill": 0, "seconds": {"total": 19.0}}]
    lines += [{"kill": 1 + number, "seconds": {"total": 11.0 + number}} for number in range(kills)]
    assert as_table(lines).splitlines()[-1] == f"| total | 19.00 | {middle} | {late} | 100% |"
