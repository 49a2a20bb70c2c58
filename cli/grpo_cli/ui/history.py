"""The rows of a run that a page shows, bounded, and those that a browser lacks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

MAX_POINTS = 1000
"""Points of a curve in one answer; longer curves are averaged over neighbouring steps."""
MAX_COMPLETIONS = 400
"""Completions in one answer; the newest are sent."""
KEPT_STEPS = 100_000
KEPT_COMPLETIONS = 4000


class History:
    """Rows of metrics and completions in order of steps, and the row of ranks.jsonl for the newest step."""

    def __init__(self) -> None:
        self.generation = 0  # increases when steps are repeated: a browser then has rows of lost steps
        self.metrics: list[Row] = []
        self.completions: list[Row] = []
        self.ranks: Row | None = None
        self.older_completions = 0  # that were left out, being too many

    @property
    def last_step(self) -> int:
        """The newest step, counted from 0; -1 before the first."""
        return int(self.metrics[-1]["step"]) if self.metrics else -1

    def add(self, rows: Mapping[str, Sequence[Row]]) -> None:
        """Append newer rows, by file. Rows of known steps restart the history."""
        if rows.get("metrics") and rows["metrics"][0]["step"] <= self.last_step:
            self.clear()
        self.metrics = [*self.metrics, *rows.get("metrics", ())][-KEPT_STEPS:]
        completions = [*self.completions, *rows.get("completions", ())]
        self.completions = completions[-KEPT_COMPLETIONS:]
        self.older_completions += len(completions) - len(self.completions)
        if rows.get("ranks"):
            self.ranks = rows["ranks"][-1]

    def clear(self) -> None:
        """Forget all rows."""
        self.generation += 1
        self.metrics, self.completions, self.ranks, self.older_completions = [], [], None, 0

    def since(self, generation: int, after: int) -> dict[str, Any]:
        """Return what a browser with the steps up to `after` of `generation` lacks; `each` is the steps per point."""
        after = after if generation == self.generation else -1
        new = [row for row in self.metrics if row["step"] > after]
        points, each = decimated(new, MAX_POINTS)
        return {
            "generation": self.generation,
            "after": after,
            "metrics": points,
            "each": each,
            "completions": [row for row in self.completions if row["step"] > after][-MAX_COMPLETIONS:],
            "ranks": self.ranks,
        }


def decimated(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """Return at most `most` rows, and how many neighbours each is the mean of; it has the step of the last one."""
    each = max(1, -(-len(rows) // most))
    if each == 1:
        return list(rows), 1
    return [_mean(rows[first : first + each]) for first in range(0, len(rows), each)], each


def _mean(rows: Sequence[Row]) -> Row:
    mean: dict[str, Any] = {}
    for name in rows[-1]:
        known = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        mean[name] = sum(known) / len(known) if known else None
    return mean | {"step": rows[-1]["step"]}
