"""Rank 0's progress file: how a rank tells its launcher, over the pod's state folder, where the training is."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from grpo_workload.contract import Progress

FILE_NAME = "progress.json"


def write_progress(state_dir: Path, progress: Progress) -> None:
    """Replace the file atomically: a reader sees the old or the new progress, never half of one.

    `age_seconds` is the time since the last step as the writer knows it: 0 at the end of a step, more when only the phase changed.
    Metrics that are not finite are left out, since JSON cannot say them.
    """
    metrics = {name: value for name, value in progress.metrics.items() if math.isfinite(value)}
    target = state_dir / FILE_NAME
    fresh = target.with_suffix(".tmp")
    fresh.write_text(progress.model_copy(update={"metrics": metrics}).model_dump_json(by_alias=True, exclude_none=True))
    fresh.replace(target)


def read_progress(state_dir: Path) -> Progress | None:
    """The last progress written, its `age_seconds` brought up to now; None before the first write."""
    target = state_dir / FILE_NAME
    try:
        with target.open() as file:
            written = os.fstat(file.fileno()).st_mtime
            progress = Progress.model_validate_json(file.read())
    except FileNotFoundError:
        return None
    return progress.model_copy(update={"age_seconds": progress.age_seconds + max(0.0, time.time() - written)})
