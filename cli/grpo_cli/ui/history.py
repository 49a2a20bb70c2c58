"""What a page knows of a run: its rows, bounded, and what of them is new to a browser. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

MAX_POINTS = 1000
"""Points of a curve in one answer: what is longer is averaged over neighbouring steps."""
MAX_COMPLETIONS = 400
"""Completions in one answer, the newest."""
KEPT_STEPS = 100_000
KEPT_COMPLETIONS = 4000


class History:
    """Rows of metrics and completions in the order of their steps, and the ranks' part in the newest step."""

    def __init__(self) -> None:
        self.generation = 0  # counts up when steps are taken anew: what a browser has is then of lost steps
        self.metrics: list[Row] = []
        self.completions: list[Row] = []
        self.ranks: Row | None = None

    @property
    def last_step(self) -> int:
        """The newest step, counted from 0; -1 before the first."""
        return int(self.metrics[-1]["step"]) if self.metrics else -1

    def add(self, rows: Mapping[str, Sequence[Row]]) -> None:
        """Append newer rows, by file. Steps that are there already begin the history anew."""
        if rows.get("metrics") and rows["metrics"][0]["step"] <= self.last_step:
            self.clear()
        self.metrics = [*self.metrics, *rows.get("metrics", ())][-KEPT_STEPS:]
        self.completions = [*self.completions, *rows.get("completions", ())][-KEPT_COMPLETIONS:]
        if rows.get("ranks"):
            self.ranks = rows["ranks"][-1]

    def clear(self) -> None:
        """Forget all rows."""
        self.generation += 1
        self.metrics, self.completions, self.ranks = [], [], None

    def since(self, generation: int, after: int) -> dict[str, Any]:
        """What a browser lacks that has steps up to `after` of `generation`; `each` tells how many steps a point stands for."""
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
    """At most `most` rows, each the mean of as many neighbours under the last one's step, and how many those are."""
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
