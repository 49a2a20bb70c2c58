"""Seconds from SIGKILL of a rank to its next optimizer step, and where they go.

    python -m benchmarks.training.rank_kills --output rank_kills_h200.jsonl
    python -m benchmarks.training.rank_kills --device cpu --size tiny --kills 3 --output rank_kills_cpu.jsonl
    python -m benchmarks.training.rank_kills --summary rank_kills_h200.jsonl

A job with one trainer rank and a vLLM server on a pod of its own, by `grpo run`, with `restartStrategy: InPlace` and no
back-off. Once it has a checkpoint, the rank is killed at a random moment of each second or third step that it takes.
Parts of a recovery are read from the log of the trainer pod:

    seen: the launcher has noticed it, and ends    processes: the next one has started a rank, with its programs loaded
    model: the checkpoint is checked and loaded    engine: it has the weights, and they are checked
    first step: completions, of which the journal may have some, and the optimizer step

The first line is of the job's start, where the engine loads too; one for each kill follows. On GPUs, two are needed:
the first two of CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import about, append, commit, measured, run_job
from benchmarks.generation.topologies import GRAPHS
from benchmarks.training.kills import command

MODULE = "benchmarks.training.rank_kills"
RANK, LAUNCHER = "grpo_workload.rank", "grpo_workload.trainer_pod"
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?:rank 0 )?INFO (.*)")
_PART = re.compile(r"start: (.+) took ([\d.]+) s; ([\d.]+) s since")
GROUPS = {  # of the parts that the log names
    "seen": ("seen",),
    "processes": ("restart", "programs"),
    "model": ("checkpoint", "data", "model", "states", "trial", "micro-batches"),
    "engine": ("engines",),
    "first step": ("first step",),
}


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Vary within each group, whatever was sampled; without torch, which a reward's process would load first."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


class DoneError(Exception):
    """All kills are done, or the time is over."""


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True)
@click.option("--kills", default=20, show_default=True)
@click.option("--seconds", default=540, show_default=True, help="After these, the job ends with the kills that it has.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the random model; made if missing.")
@click.option("--output", type=click.Path(path_type=Path))
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print a file of results as a table.")
def main(
    device: str, size: str, kills: int, seconds: float, model: Path | None, output: Path | None, summary: Path | None
) -> None:
    if summary is not None:
        click.echo(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
        return
    if output is None:
        raise click.UsageError("one of --output and --summary is needed")
    deadline, lines = time.monotonic() + seconds, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        folder = make_model(model or Path(scratch) / "model", size, device, kind="qwen2", max_length=4096).resolve()

        def write(line: dict[str, Any]) -> None:
            described = {"device": device, "size": size, "commit": commit(), "cpus": os.cpu_count()}
            append(output, described | line | about(MODULE, device=device, size=size, kills=kills, seconds=seconds))
            lines.append(line)
            click.echo(json.dumps(line))

        def measure(scene: Path) -> dict[str, Any]:
            killer = Killer(scene, kills, deadline, write)
            with contextlib.suppress(DoneError):
                run_job(scene, spec(folder, device), 10**6, seconds=seconds + 60, watch=killer)
            return {}

        failure = measured("kills", scratch, measure)
    if failure:
        write(failure)
    click.echo(as_table(lines))
    sys.exit(bool(failure) or len(lines) < 2)


class Killer:
    """Kills the rank again and again, and writes a line once it has recovered."""

    def __init__(self, folder: Path, kills: int, deadline: float, write: Any) -> None:
        self._folder, self._kills, self._deadline, self._write = folder, kills, deadline, write
        self._draw, self._killed = random.Random(1), 0
        self._at: float | None = None  # when the rank was killed; None before the first time
        self._next: tuple[int, float] | None = None  # steps after which the rank is killed, and the time after these

    def __call__(self, finished: int) -> None:
        """Take a look; `finished` is the number of finished steps."""
        if time.monotonic() > self._deadline:
            raise DoneError
        if self._next is None:
            if (seconds := recovery(self._log(), self._at)) is None:
                return
            self._write({"kill": self._killed, "finished": finished, "seconds": seconds})
            if self._killed == self._kills:
                raise DoneError
            self._next = finished + self._draw.randrange(1, 3), 0.0
        steps, at = self._next
        if finished < steps or not any(self._folder.glob("run/*/data/*/*/*/checkpoints/step-*/manifest.json")):
            return
        if not at:
            self._next = steps, time.monotonic() + self._draw.random() * self._step_seconds()
        elif time.monotonic() > at:
            (rank,) = (one for one in psutil.Process().children(recursive=True) if is_rank(one))
            self._at, self._next, self._killed = time.time(), None, self._killed + 1
            rank.kill()

    def _log(self) -> str:
        found = list(self._folder.glob("run/*/pods/bench-t-0/launcher.log"))
        return found[0].read_text(errors="replace") if found else ""

    def _step_seconds(self) -> float:
        (metrics,) = self._folder.glob("run/*/data/*/*/*/metrics.jsonl")
        return float(json.loads(metrics.read_text().splitlines()[-1])["step_time"])


def is_rank(process: psutil.Process) -> bool:
    """Whether the process is a rank, and not a child of one."""
    return RANK in command(process) and LAUNCHER in command(process.parent())


def recovery(log: str, killed: float | None, seen: float = 0.0) -> dict[str, float] | None:
    """Return the seconds of each part of what followed a kill, by name; None before the next step is done.

    Args:
        log: of the trainer pod, with the lines of its rank.
        killed: when the rank was killed, in seconds since 1970; None for the start of the job.
        seen: when that was seen, if the log does not say it.
    """
    parts: dict[str, float] = {}
    for line in log.splitlines():
        if (found := _LINE.search(line)) is None:
            continue
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()  # of this machine's zone
        if killed is not None and at < killed:
            continue
        if "ended with RankFailed" in found[2]:
            seen = at
        if (part := _PART.search(found[2])) is None:
            continue
        if part[1] == "programs" and killed is not None:
            parts = {"seen": seen - killed, "restart": at - float(part[3]) - seen}
        parts[part[1]] = float(part[2])
        if part[1] == "first step":
            total = sum(parts.values()) if killed is None else at - killed
            return {name: round(value, 3) for name, value in (parts | {"total": total}).items()}
    return None


def as_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of seconds by part: of the start, median and 95th percentile of recoveries, and the
    median of the part's share of a recovery, which says more where others use the same processors.
    """
    start: dict[str, float] = next((line["seconds"] for line in lines if line.get("kill") == 0), {})
    kills = [line["seconds"] for line in lines if line.get("kill")]
    table = [f"| part | start | median of {len(kills)} kills | p95 | share |", "|" + " --- |" * 5]
    for name, parts in (*GROUPS.items(), ("total", ("total",))):
        values = sorted(sum(one.get(part, 0.0) for part in parts) for one in kills)
        cells = [sum(start.get(part, 0.0) for part in parts)]
        cells += [statistics.median(values), values[-1 - len(values) // 20]] if values else []
        shares = [sum(one.get(part, 0.0) for part in parts) / one["total"] for one in kills]
        share = f"{statistics.median(shares):.0%}" if shares else ""
        table.append(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {share} |")
    return "\n".join(table)


def spec(model: Path, device: str) -> dict[str, Any]:
    """Return the spec of the job."""
    is_cuda = device == "cuda"
    engine: dict[str, Any] = (
        {"gpuMemoryUtilization": 0.6, "engineArgs": {"max_num_seqs": 64, "compilation_config": GRAPHS}}
        if is_cuda
        else {"kvCacheMemory": "64Mi", "engineArgs": {"enforce_eager": True}}
    )
    return {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": [{"name": "reward", "function": f"{MODULE}:reward"}],
        "training": {
            "promptsPerStep": 8 if is_cuda else 4,
            "numGenerations": 8 if is_cuda else 4,
            "maxSteps": 10**5,
            "maxCompletionLength": 256 if is_cuda else 32,
        },
        "parallelism": {"gradientCheckpointing": True},
        "generation": {
            "topology": "Server",
            "maxModelLen": 1024,
            "server": {"groups": [{"name": "e", "gpus": 1}]},
            **engine,
        },
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 4, "keep": 1},
        "failurePolicy": {"restartStrategy": "InPlace", "backoffSeconds": 0, "maxRestarts": 10_000},
        "rendezvous": {"timeoutSeconds": 300},
    }


if __name__ == "__main__":
    main()
