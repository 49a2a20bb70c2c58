"""Follow a job until it is Complete or Failed: in a live table on a terminal, elsewhere with a line per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.live import Live

from grpo_demo import display
from grpo_demo.console import DemoError, console
from grpo_demo.results import Row, read_rows

PATIENCE_SECONDS = 600
"""Seconds without a change after which the job counts as stuck; starting vLLM in every rank takes longest."""

POLL_SECONDS = 1.0

Job = dict[str, Any]


@dataclass(frozen=True)
class Sight:
    """State of the job at one moment."""

    caption: str
    rows: list[Row]


def until_finished(read_job: Callable[[], Job], metrics: Path) -> Job:
    """Show progress until the job ends, and return the job. Raises DemoError when nothing changes for too long."""
    last: Sight | None = None
    moved = time.monotonic()
    with _screen() as draw:
        while True:
            job = read_job()
            sight = Sight(_caption(job), read_rows(metrics))
            if sight != last:
                draw(last, sight)
                last, moved = sight, time.monotonic()
            if condition(job, "Complete") or condition(job, "Failed"):
                return job
            if time.monotonic() - moved > PATIENCE_SECONDS:
                raise DemoError(f"no change for {PATIENCE_SECONDS} s; last seen: {sight.caption}")
            time.sleep(POLL_SECONDS)


def condition(job: Job, kind: str) -> bool:
    """Return whether a condition of the job is True."""
    return any(c["type"] == kind and c["status"] == "True" for c in job.get("status", {}).get("conditions", ()))


@contextmanager
def _screen() -> Iterator[Callable[[Sight | None, Sight], None]]:
    if not console.is_terminal:
        yield _print_news
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda _, sight: live.update(display.live_table(sight.rows, sight.caption), refresh=True)


def _print_news(last: Sight | None, sight: Sight) -> None:
    if last is None or sight.caption != last.caption:
        console.print(f"   {sight.caption}", markup=False, soft_wrap=True)
    for row in sight.rows[len(last.rows) if last else 0 :]:
        console.print(f"   {display.line(row)}", markup=False, soft_wrap=True)


def _caption(job: Job) -> str:
    status = job.get("status", {})
    summary = status.get("summary", {})
    parts = [
        f"phase {status.get('phase', 'not yet seen by the operator')}",
        f"step {summary.get('step') or '-'}",
        f"trainer pods ready {summary.get('trainer') or '-'}",
        f"restarts {status.get('restarts', {}).get('total', 0)}",
    ]
    if (phase := status.get("phase")) not in ("Running", "Succeeded"):
        parts.append(f"{summary.get('reason', '')}: {summary.get('message', '')}" if phase else "")
    return ", ".join(part for part in parts if part)
