"""Reward curves of small jobs that differ in one option, for several seeds, side by side on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.busy import gpu_names
from benchmarks.common.runs import about, append, measured, run_job

Line = dict[str, Any]


def at_once(module: str, name: str, runs: Sequence[tuple[str, int]], output: Path, options: Mapping[str, Any]) -> int:
    """Run `module` for each value of its option `name` and seed, all at once; return how many failed."""
    shared = [f"--{one}={value}" for one, value in options.items() if value is not None]
    command = [sys.executable, "-m", module, f"--output={output}", *shared]
    jobs = [subprocess.Popen([*command, f"--{name}={value}", f"--seed={seed}"]) for value, seed in runs]
    return sum([job.wait() != 0 for job in jobs])


def train(
    module: str,
    line: Line,
    chosen: Line,
    spec: Callable[[Path], dict[str, Any]],
    curves: Mapping[str, str],
    output: Path,
    options: Line,
) -> Line:
    """Train once, and append a line.

    Args:
        module: whose command the line names.
        line: its first fields.
        chosen: what distinguishes this job from the others of `module`, by option.
        spec: makes the job's spec, with its files in a folder.
        curves: metrics of a step, by the names that the line has for them.
        output: the file of results.
        options: further options of the command, with `steps`, `seconds` and `device`.

    Returns:
        The line; it has an `error` if the job failed.
    """

    def measure(folder: Path) -> Line:
        rows = run_job(
            folder, spec(folder), options["steps"], seconds=options["seconds"], least=min(2, options["steps"])
        )
        # A step whose rewards are all equal trains on nothing, and has no `trained/`.
        return {curve: [row.get(metric) for row in rows] for curve, metric in curves.items()}

    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        line |= measured(" ".join(map(str, chosen.values())), scratch, measure)
    given = {name: value for name, value in options.items() if value is not None}
    line |= about(module, **chosen, **given) | {"gpus": gpu_names() if options["device"] == "cuda" else []}
    append(output, line)
    return line
