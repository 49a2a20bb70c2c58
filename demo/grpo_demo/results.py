"""Read metrics and completions from a run's folder, also while it trains, and judge whether the model learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

EDGE = 5
"""Number of steps averaged at each end: the reward of one step, a mean of about fifty samples, is noisy."""

MARGIN = 0.05
"""A smaller rise of the reward may be chance."""

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSONL file without an unfinished last line; none while the file does not exist."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def evaluated(rows: Sequence[Row]) -> str:
    """Describe the first and the last evaluation, of problems that the job does not train on; empty without two."""
    if len(rows) < 2:
        return ""
    ends = rows[0], rows[-1]
    what = "eval/rewards/accuracy/mean"
    if what in rows[0]:
        before, after = (f"{row[what]:.0%}" for row in ends)
    else:
        before, after = (f"mean reward {row['eval/reward']:.2f}" for row in ends)
    return f"{before} before, {after} after, of {rows[-1]['eval/num_prompts']:.0f} that it was not trained on"


@dataclass(frozen=True)
class Verdict:
    """Whether the reward rose from the first steps to the last ones."""

    before: float
    after: float
    edge: int

    @property
    def rose(self) -> bool:
        """Whether the reward rose by more than the margin."""
        return self.after - self.before > MARGIN

    def __str__(self) -> str:
        how = f"{self.before:.3f} over the first {self.edge} steps, {self.after:.3f} over the last {self.edge}"
        return f"mean reward {how}: {self.after - self.before:+.3f} (to count as learned: more than +{MARGIN})"


def judge(rows: Sequence[Row]) -> Verdict:
    """Compare the rewards of the first and the last steps. Raises ValueError when there are too few steps."""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    if len(rewards) < 2:
        raise ValueError(f"{len(rewards)} steps with a reward are too few to show a rise")
    edge = min(EDGE, len(rewards) // 2)
    return Verdict(fmean(rewards[:edge]), fmean(rewards[-edge:]), edge)
