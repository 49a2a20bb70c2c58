"""Files in the pod's state folder in which ranks report to their launcher: rank 0's progress and every rank's phase.

A rank that hangs would not answer requests; the launcher reads the files and always answers.
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

from grpo_spec.reports import Progress

FILE_NAME = "progress.json"
PHASES = "phases"
BEATS = "beats"
RANK_STEPS = "rank-steps"
WAITING = "waiting-episodes"


def write_progress(state_dir: Path, progress: Progress) -> None:
    """Replace the file atomically: a reader sees the old or the new progress, never a part.

    `age_seconds` is the time since the last step when this is written: 0 at the end of a step, more if only the phase
    has changed. Metrics that are not finite are left out, since JSON lacks them.
    """
    metrics = {name: value for name, value in progress.metrics.items() if math.isfinite(value)}
    text = progress.model_copy(update={"metrics": metrics}).model_dump_json(by_alias=True, exclude_none=True)
    _replace(state_dir / FILE_NAME, text)


def read_progress(state_dir: Path) -> Progress | None:
    """Return the last progress, with `age_seconds` as of now; None before the first write."""
    target = state_dir / FILE_NAME
    try:
        with target.open() as file:
            written = os.fstat(file.fileno()).st_mtime
            progress = Progress.model_validate_json(file.read())
    except FileNotFoundError:
        return None
    return progress.model_copy(update={"age_seconds": progress.age_seconds + max(0.0, time.time() - written)})


def write_phase(state_dir: Path, rank: int, phase: str) -> None:
    """Record that the global rank `rank` enters `phase`, a word such as Generating; atomic."""
    (folder := state_dir / PHASES).mkdir(exist_ok=True)
    _replace(folder / str(rank), phase)


def read_phase(state_dir: Path, rank: int) -> tuple[str, float] | None:
    """Return the phase of `rank`, and for how many seconds it has been in it; None before the first."""
    try:
        with (state_dir / PHASES / str(rank)).open() as file:
            return file.read(), max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def write_beat(state_dir: Path, rank: int) -> None:
    """Record that the global rank `rank` makes progress: it has just sampled a token or scored an answer."""
    (folder := state_dir / BEATS).mkdir(exist_ok=True)
    (folder / str(rank)).touch()


def read_idle(state_dir: Path, ranks: Iterable[int]) -> float | None:
    """Return the seconds since one of `ranks` entered a phase or made progress in one; None before the first phase."""
    files = [state_dir / folder / str(rank) for rank in ranks for folder in (PHASES, BEATS)]
    moved = [file.stat().st_mtime for file in files if file.exists()]
    return max(0.0, time.time() - max(moved)) if moved else None


def read_phases(state_dir: Path, ranks: Iterable[int]) -> dict[str, str]:
    """Return the phases of those `ranks` that have one, for people: {"3": "Generating for 1830 s"}."""
    phases = {rank: read_phase(state_dir, rank) for rank in ranks}
    return {str(rank): f"{phase[0]} for {phase[1]:.0f} s" for rank, phase in phases.items() if phase is not None}


def write_rank_step(state_dir: Path, rank: int, record: Mapping[str, object]) -> None:
    """Record what the global rank `rank` did in its last step (`RankStep.as_json`); atomic."""
    (folder := state_dir / RANK_STEPS).mkdir(exist_ok=True)
    _replace(folder / str(rank), json.dumps(record))


def read_rank_step(state_dir: Path, rank: int) -> dict[str, Any] | None:
    """Return the record of the last step of `rank`; None before the first."""
    try:
        record: dict[str, Any] = json.loads((state_dir / RANK_STEPS / str(rank)).read_text())
    except FileNotFoundError:
        return None
    return record


def write_waiting(state_dir: Path, rank: int, count: int) -> None:
    """Record how many episodes of the global rank `rank` wait for a session of an environment pod; atomic."""
    (folder := state_dir / WAITING).mkdir(exist_ok=True)
    _replace(folder / str(rank), str(count))


def read_waiting(state_dir: Path, rank: int) -> int | None:
    """Return what `write_waiting` recorded last; None before."""
    try:
        return int((state_dir / WAITING / str(rank)).read_text())
    except FileNotFoundError:
        return None


def forget_progress(state_dir: Path) -> None:
    """Remove the files that ranks of an earlier attempt left in the folder."""
    (state_dir / FILE_NAME).unlink(missing_ok=True)
    for folder in (state_dir / name for name in (PHASES, BEATS, RANK_STEPS, WAITING)):
        if folder.exists():
            shutil.rmtree(folder)


def _replace(target: Path, text: str) -> None:
    fresh = target.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(target)
