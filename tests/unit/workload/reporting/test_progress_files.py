"""Progress and phases that ranks write are read back with their age; what is not finite or outdated is dropped."""

import math
import os
import re
import time
from pathlib import Path

from grpo_spec.reports import Progress
from grpo_workload.reporting.progress_files import (
    FILE_NAME,
    forget_progress,
    read_idle,
    read_phases,
    read_progress,
    read_waiting,
    write_beat,
    write_phase,
    write_progress,
    write_waiting,
)


def test_nothing_is_read_before_the_first_write(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None


def test_the_last_write_is_read_with_its_age(tmp_path: Path) -> None:
    write_progress(tmp_path, Progress(step=1))
    write_progress(tmp_path, Progress(step=2, total_steps=9, phase="Training", reward=0.5, age_seconds=10))
    minute_ago = time.time() - 60
    os.utime(tmp_path / FILE_NAME, (minute_ago, minute_ago))

    progress = read_progress(tmp_path)

    assert progress is not None
    assert (progress.step, progress.total_steps, progress.phase, progress.reward) == (2, 9, "Training", 0.5)
    assert 70 <= progress.age_seconds < 80


def test_metrics_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    write_progress(tmp_path, Progress(metrics={"reward": 0.5, "kl": math.nan, "ratio": math.inf}))

    progress = read_progress(tmp_path)

    assert progress is not None
    assert progress.metrics == {"reward": 0.5}


def test_the_phase_of_each_rank_is_read_with_its_age(tmp_path: Path) -> None:
    write_phase(tmp_path, 7, "Loading")
    write_phase(tmp_path, 7, "Generating")
    write_phase(tmp_path, 8, "Training")
    half_an_hour_ago, tomorrow = time.time() - 1830, time.time() + 86400
    os.utime(tmp_path / "phases" / "7", (half_an_hour_ago, half_an_hour_ago))
    os.utime(tmp_path / "phases" / "8", (tomorrow, tomorrow))  # a clock that was set back

    found = read_phases(tmp_path, range(6, 9))
    assert re.fullmatch(r"Generating for 18[3-9]\d s", found.pop("7"))
    assert found == {"8": "Training for 0 s"}
    forget_progress(tmp_path)
    assert read_phases(tmp_path, range(6, 9)) == {}


def test_ranks_that_sample_tokens_or_enter_phases_are_not_idle(tmp_path: Path) -> None:
    assert read_idle(tmp_path, range(2)) is None
    for rank in range(2):
        write_phase(tmp_path, rank, "Generating")
        hour_ago = time.time() - 3600
        os.utime(tmp_path / "phases" / str(rank), (hour_ago, hour_ago))
    assert 3600 <= (read_idle(tmp_path, range(2)) or 0) < 3700
    write_beat(tmp_path, 1)
    assert (read_idle(tmp_path, range(2)) or 0) < 100
    assert (read_idle(tmp_path, range(1)) or 0) > 3000, "ranks of another pod do not count"


def test_episodes_that_wait_are_those_that_were_written_last(tmp_path: Path) -> None:
    write_waiting(tmp_path, 3, 12)
    write_waiting(tmp_path, 3, 5)
    assert (read_waiting(tmp_path, 3), read_waiting(tmp_path, 4)) == (5, None)
    forget_progress(tmp_path)
    assert read_waiting(tmp_path, 3) is None
