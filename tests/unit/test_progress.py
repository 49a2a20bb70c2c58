import math
import os
import time
from pathlib import Path

from grpo_workload.contract import Progress
from grpo_workload.progress import FILE_NAME, read_progress, write_progress


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
