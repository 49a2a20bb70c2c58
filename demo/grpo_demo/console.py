"""The demo's output: numbered steps with their times, and what their programs print."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console

console = Console(highlight=False)
_numbers = count(1)


class DemoError(Exception):
    """The demo cannot continue; the text says why."""


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step, and say afterwards how long it took."""
    start = time.monotonic()
    console.print(f"\n[bold cyan]{next(_numbers)}. {title}[/]", soft_wrap=True)
    yield
    console.print(f"   [green]done[/] in {time.monotonic() - start:.1f} s")


def run(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> list[str]:
    """Run a program, show its output while it runs, and return the lines. Raises DemoError when it fails."""
    words = [str(word) for word in command]
    lines: list[str] = []
    with subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            show(lines[-1])
    if process.returncode:
        raise DemoError(f"{' '.join(words)}: exit status {process.returncode}")
    return lines


def show(text: str) -> None:
    """Print a line of another program's output unchanged."""
    console.print(f"   {text}", style="dim", markup=False, soft_wrap=True)
