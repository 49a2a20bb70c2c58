"""Read the newest lines of a run's files from their ends, so a long run costs no more than a short one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spec.reports import RUN_FILES

Row = dict[str, Any]

MAX_ROWS = 2000
"""Most rows of one file in one answer."""
MAX_BYTES = 4 << 20
"""Most bytes of one file that are read for one answer."""
FIRST_BYTES = 1 << 16


def read_history(
    run_dir: Path, *, after: int = -1, limit: int = MAX_ROWS, files: Sequence[str] = RUN_FILES
) -> dict[str, list[Row]]:
    """Return for each file its newest rows of steps later than `after` (counted from 0), oldest first.

    Each file gives at most `limit` rows and MAX_BYTES; one that does not exist yet gives none.

    Raises:
        ValueError: unknown file, or a limit outside of 1 to MAX_ROWS.
        OSError: a file cannot be read.
    """
    if not 1 <= limit <= MAX_ROWS:
        raise ValueError(f"limit is {limit}, but must be 1 to {MAX_ROWS}")
    if unknown := sorted(set(files) - set(RUN_FILES)):
        raise ValueError(f"of: there is no file {', '.join(unknown)}; use {', '.join(RUN_FILES)}")
    return {name: _newest(run_dir / f"{name}.jsonl", after, limit) for name in files}


def _newest(path: Path, after: int, limit: int) -> list[Row]:
    size, rows = FIRST_BYTES, list[Row]()
    while True:
        try:
            rows, whole = _tail(path, size)
        except FileNotFoundError:
            return []
        if whole or size >= MAX_BYTES or len(rows) > limit or (rows and rows[0]["step"] <= after):
            return [row for row in rows if row["step"] > after][-limit:]
        size = min(size * 4, MAX_BYTES)


def _tail(path: Path, size: int) -> tuple[list[Row], bool]:
    """Return the rows that lie completely in the last `size` bytes, and whether that is the whole file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - size)
        # One byte more: the newline before `start` shows that a line begins there.
        file.seek(max(0, start - 1))
        lines = file.read(size + 1).split(b"\n")
    # Text after the last newline is a line that is being written, or was when a rank was killed.
    return [json.loads(line) for line in lines[start > 0 : -1]], start == 0
