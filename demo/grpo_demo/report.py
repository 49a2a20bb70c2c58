"""Report of a finished run: curve, completions, checkpoint, and the verdict that decides the exit status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_demo import display
from grpo_demo.console import console, step
from grpo_demo.results import EDGE, Verdict, evaluated, judge, read_rows


@dataclass(frozen=True)
class Run:
    """Folders of a finished run."""

    folder: Path
    checkpoint: Path


def report(run: Run, output: Path) -> Verdict:
    """Show the results, and write the curve to `output`."""
    with step("What the model has learned"):
        rows = read_rows(run.folder / "metrics.jsonl")
        verdict = judge(rows)
        display.curve_in_terminal(rows)
        picture = output / "reward.png"
        display.curve_as_png(rows, picture, "quickstart: reward and accuracy by step")
        rows_read = read_rows(run.folder / "completions.jsonl")
        samples = [row for row in rows_read if "lost" not in row.get("episode", {})]
        steps = sorted({row["step"] for row in samples})
        for title, some in (("Before", steps[:EDGE]), ("After", steps[-EDGE:])):
            display.completions(
                f"{title} (of steps {some[0]} to {some[-1]})", [row for row in samples if row["step"] in some]
            )
        if solved := evaluated(read_rows(run.folder / "evaluations.jsonl")):
            console.print(f"   solved      {solved}", soft_wrap=True)
        console.print(f"   curve       {picture.resolve()}", soft_wrap=True)
        console.print(f"   metrics     {run.folder / 'metrics.jsonl'}", soft_wrap=True)
        console.print(f"   checkpoint  {run.checkpoint}", soft_wrap=True)
    return verdict
