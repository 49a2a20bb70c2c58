"""The rows of `trainer.py` as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SAME = {"fp32", "corrected", "nockpt"}
"""Options that must be equal for a comparison; in the others, TRL may use its best."""
COLUMNS = (
    "row",
    "step s",
    "generation s",
    "rest s",
    "sleep + wake s",
    "memory GiB",
    "step / TRL's",
    "rest / TRL's",
    "memory / TRL's",
)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of each row, and ratios to the best step, rest and memory that TRL reaches under the same settings."""
    lines = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS))]
    theirs = [row for row in rows if row["row"].startswith("trl-")]
    lines += [" | ".join(_cells(row, [peer for peer in theirs if _key(peer) == _key(row)])) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cells(row: dict[str, Any], peers: Sequence[dict[str, Any]]) -> list[str]:
    median = row["median"]
    cycle = median["sleep"] + median["wake"] if "sleep" in median else None
    own = [median["step"], median["generation"], median["rest"], cycle, row["memory_gib"]]
    cells = [row["row"], *("" if value is None else f"{value:.2f}" for value in own)]
    if row["row"].startswith("trl-") or not peers:
        return [*cells, "", "", ""]
    pairs = [(median[name], min(peer["median"][name] for peer in peers)) for name in ("step", "rest")]
    if row["memory_gib"] is not None:
        pairs.append((row["memory_gib"], min(peer["memory_gib"] for peer in peers)))
    return [*cells, *(f"{value / best:.2f}" for value, best in pairs), *[""] * (2 + 1 - len(pairs))]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    _, lengths, *options = row["row"].split("-")
    return row["settings"]["size"], row["device"], lengths, frozenset(options) & SAME
