"""Files of JSON lines, one line per step, that stay valid when a run is interrupted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

EVALUATIONS = "evaluations.jsonl"
"""File in the run's folder with every evaluation, under the number of steps that were taken before it."""


class StepLog:
    """Appends JSON objects, each with its step, to a file."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open `path`, and drop lines of steps >= `resume_step`: a resumed run continues from its checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _truncate(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append a line, which readers see when this returns. NaN and infinity, which JSON lacks, become null."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_evaluations(run_dir: Path, step: int) -> dict[int, dict[str, float]]:
    """Return the evaluations of a run that were made after at most `step` steps, by the number of steps."""
    path = run_dir / EVALUATIONS
    rows = [json.loads(line) for line in _lines(path)] if path.exists() else []
    return {
        row["step"]: {name: math.nan if value is None else value for name, value in row.items() if name != "step"}
        for row in rows
        if row["step"] <= step
    }


def _lines(path: Path) -> list[str]:
    # If a rank was killed while it wrote the last line, that line has no newline.
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _truncate(path: Path, resume_step: int) -> None:
    lines = _lines(path)
    kept = path.with_name(f"{path.name}.kept")
    kept.write_text("".join(line for line in lines if json.loads(line)["step"] < resume_step), encoding="utf-8")
    os.replace(kept, path)
