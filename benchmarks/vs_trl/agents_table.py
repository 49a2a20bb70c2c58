"""The results of `agents.py` as a table."""

from __future__ import annotations

from typing import Any


def as_table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: one row per result."""
    table = ["| side | call s | own tokens/s | step s | rollout s | GPU idle | cores |", "|" + " --- |" * 7]
    for line in lines:
        cells = [line["side"], f"{line['latency']:g}"]
        if error := line.get("error"):
            table.append(f"| {' | '.join(cells)} | failed: {error.splitlines()[0]} |" + " |" * 4)
            continue
        seconds = line.get("median") or line["mean"]  # sides that sample ahead have no rollout of a step
        cells += [f"{line['tokens_per_second']:,}", f"{seconds['step']:.2f}"]
        cells += [f"{seconds['rollout']:.2f}" if "rollout" in seconds else ""]
        cells += [" ".join(f"{share:.0%}" for share in line["gpu_idle"]), f"{line['busy']['cores']:.1f}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)
