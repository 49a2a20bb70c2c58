"""How ranks tell their launcher, over the pod's state folder, where they are: rank 0's progress, and the phase of every rank.

Files, since a rank that is stuck answers nothing; they are read by the launcher, which always does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_workload.contract import Progress

FILE_NAME = "progress.json"
PHASES = "phases"
RANK_STEPS = "rank-steps"


def write_progress(state_dir: Path, progress: Progress) -> None:
    """Replace the file atomically: a reader sees the old or the new progress, never half of one.

    `age_seconds` is the time since the last step as the writer knows it: 0 at the end of a step, more when only the phase changed.
    Metrics that are not finite are left out, since JSON cannot say them.
    """
    metrics = {name: value for name, value in progress.metrics.items() if math.isfinite(value)}
    text = progress.model_copy(update={"metrics": metrics}).model_dump_json(by_alias=True, exclude_none=True)
    _replace(state_dir / FILE_NAME, text)


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


def write_phase(state_dir: Path, rank: int, phase: str) -> None:
    """Tell that the global rank `rank` enters `phase`, a word such as Generating; atomic."""
    (folder := state_dir / PHASES).mkdir(exist_ok=True)
    _replace(folder / str(rank), phase)


def read_phase(state_dir: Path, rank: int) -> tuple[str, float] | None:
    """The phase that `rank` has entered last, and for how many seconds it is in it; None before the first."""
    try:
        with (state_dir / PHASES / str(rank)).open() as file:
            return file.read(), max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def read_phases(state_dir: Path, ranks: Iterable[int]) -> dict[str, str]:
    """What those of `ranks` are doing that have told so, for people: {"3": "Generating for 1830 s"}."""
    told = {rank: read_phase(state_dir, rank) for rank in ranks}
    return {str(rank): f"{phase[0]} for {phase[1]:.0f} s" for rank, phase in told.items() if phase is not None}


def write_rank_step(state_dir: Path, rank: int, told: Mapping[str, object]) -> None:
    """Keep what the global rank `rank` did in the step that has ended (`RankStep.as_json`) for whoever asks; atomic."""
    (folder := state_dir / RANK_STEPS).mkdir(exist_ok=True)
    _replace(folder / str(rank), json.dumps(told))


def read_rank_step(state_dir: Path, rank: int) -> dict[str, Any] | None:
    """What `rank` told of its last step; None before the first."""
    try:
        told: dict[str, Any] = json.loads((state_dir / RANK_STEPS / str(rank)).read_text())
    except FileNotFoundError:
        return None
    return told


def forget_progress(state_dir: Path) -> None:
    """Remove what ranks of an earlier epoch have left in the folder."""
    (state_dir / FILE_NAME).unlink(missing_ok=True)
    for folder in (state_dir / PHASES, state_dir / RANK_STEPS):
        if folder.exists():
            shutil.rmtree(folder)


def _replace(target: Path, text: str) -> None:
    fresh = target.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(target)
