"""Plots of docs/performance.md. Each image's description holds the values that it shows, for a test to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.control_plane.figures import SIDES, Lines, ready, reported

Values = dict[str, Any]


def starts(lines: Lines) -> Values:
    """Return, by scenario and side, the seconds of each repetition: until ready, and until reported."""
    return {
        scenario: {
            side: [[ready(line), reported(line)] for line in lines.of(scenario, side)] for side in lines.sides(scenario)
        }
        for scenario in ("jobs", "pods")
    }


def delays(lines: Lines) -> Values:
    """Return the seconds of each repetition: until children are applied, and until failed jobs run again."""
    return {
        "children": [line["raw"]["children"] for line in lines.every if line["scenario"] == "burst"],
        "restarts": {
            side: [line["raw"]["together"] for line in lines.of("restart", side)] for side in lines.sides("restart")
        },
    }


def draw_starts(values: Values) -> Any:
    """Draw bars: the median of each side, with a dot for each repetition."""
    figure, panels = _figure(("250 jobs of 4 pods", "one job of 1,000 pods"))
    for axes, scenario in zip(panels, ("jobs", "pods"), strict=True):
        for row, repetitions in enumerate(reversed(values[scenario].values())):
            middle = sorted(repetitions, key=lambda pair: pair[1])[(len(repetitions) - 1) // 2]
            axes.barh(row, middle[1], color="#c6dbef")
            axes.barh(row, middle[0], color="#3182bd")
            axes.plot([pair[1] for pair in repetitions], [row] * len(repetitions), "k.", markersize=4)
        shown = [SIDES[side] for side in reversed(values[scenario])]
        axes.set_yticks(range(len(shown)), shown, fontsize=8)
        axes.set_xlabel("seconds: ready (dark), reported (light)")
    return figure


def draw_delays(values: Values) -> Any:
    """Draw the share of jobs over time, a line for each repetition."""
    figure, (left, right) = _figure(("100 jobs at once: all children applied", "50 failures at once: ready again"))
    colours = {"grpojob": "#3182bd", "bare": "#969696"}
    curves = [(left, one, "#3182bd", "") for one in values["children"]]
    curves += [
        (right, one, colours[side], SIDES[side] if number == 0 else "")
        for side, repetitions in values["restarts"].items()
        for number, one in enumerate(repetitions)
    ]
    for axes, curve, colour, label in curves:
        axes.step(curve, [(number + 1) / len(curve) for number in range(len(curve))], color=colour, label=label or None)
    for axes in (left, right):
        axes.set(xlabel="seconds", ylabel="share of the jobs", xlim=(0, None), ylim=(0, 1.02))
    if values["restarts"]:
        right.legend(fontsize=8)
    return figure


def _figure(titles: tuple[str, str]) -> tuple[Any, Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Texts stay texts, and equal values give equal files.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale"})
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
    return figure, panels


PLOTS = {
    "scale_starts.svg": (starts, draw_starts),
    "scale_delays.svg": (delays, draw_delays),
}
"""Images, by what they show and how it is drawn."""


def save(lines: Lines, folder: Path) -> None:
    """Draw all of them."""
    for name, (collect, draw) in PLOTS.items():
        values = collect(lines)
        metadata = {"Date": None, "Description": json.dumps(values)}
        draw(values).savefig(folder / name, format="svg", metadata=metadata)
