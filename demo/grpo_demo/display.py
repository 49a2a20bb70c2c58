"""Display of results: the live table, the reward curve in the terminal and as PNG, completions before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import plotext
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from grpo_demo.console import console
from grpo_demo.results import EDGE, Row

COLUMNS = (
    ("step", "Step", "{:.0f}"),
    ("reward", "Reward", "{:.3f}"),
    ("rewards/accuracy/mean", "Accuracy", "{:.3f}"),
    ("completions/mean_length", "Tokens/completion", "{:.1f}"),
    ("tokens_per_second", "Tokens/s", "{:.0f}"),
    ("step_time", "Seconds", "{:.1f}"),
)
_SERIES = (("reward", "reward", "•"), ("rewards/accuracy/mean", "accuracy", "x"))


def cells(row: Row) -> list[str]:
    """Return one step as strings, one for each column."""
    return ["-" if row.get(key) is None else form.format(row[key]) for key, _, form in COLUMNS]


def live_table(rows: Sequence[Row], caption: str, height: int = 15) -> Table:
    """Return a table of the newest steps, with the job's state below."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for _, title, _ in COLUMNS:
        table.add_column(title, justify="right")
    for row in rows[-height:]:
        table.add_row(*cells(row))
    return table


def line(row: Row) -> str:
    """Return one step as a line, for output that cannot be redrawn."""
    return "  ".join(f"{title.lower()} {cell}" for (_, title, _), cell in zip(COLUMNS, cells(row), strict=True))


def curve_in_terminal(rows: Sequence[Row]) -> None:
    """Draw reward and accuracy with characters."""
    plotext.clear_figure()
    plotext.theme("pro" if console.is_terminal else "clear")
    plotext.plot_size(min(console.width, 100), 20)
    for key, label, marker in _SERIES:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            plotext.plot(*map(list, zip(*points, strict=True)), label=label, marker=marker)
    plotext.xlabel("step")
    console.print(Text.from_ansi(plotext.build()))


def curve_as_png(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw reward and accuracy with their moving averages."""
    mpl.use("Agg")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="mean over the step's completions", title=title)
    for (key, label, _), color in zip(_SERIES, ("tab:blue", "tab:orange"), strict=True):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        averages = [
            sum(window) / len(window) for i in range(len(values)) if (window := values[max(0, i - EDGE + 1) : i + 1])
        ]
        axes.plot(steps, values, color=color, alpha=0.3)
        axes.plot(steps, averages, color=color, label=f"{label}, mean of {EDGE} steps")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def completions(title: str, rows: Sequence[Row], limit: int = 6) -> None:
    """Print a few completions with their rewards, one for each prompt."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    for heading in ("Prompt", "Completion"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("Reward", justify="right")
    by_prompt: dict[str, Row] = {}
    for row in rows:
        by_prompt.setdefault(_question(row["prompt"]), row)
    for question, row in list(by_prompt.items())[:limit]:
        reward = "-" if row["reward"] is None else f"{row['reward']:.2f}"
        table.add_row(Text(_flat(question)), Text(_flat(_said(row["completion"]))), reward)
    console.print(table)


def _question(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _said(completion: str | list[dict[str, Any]]) -> str:
    """Return a completion as one text; of an episode its turns, with the calls of tools."""
    if isinstance(completion, str):
        return completion
    return " | ".join(
        " ".join([turn["content"], *map(_called, turn.get("tool_calls", ()))]).strip() for turn in completion
    )


def _called(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return f"{name}({json.dumps(arguments)})" if name else str(arguments)  # without a name: what was no call


def _flat(text: str) -> str:
    return " ".join(text.split())
