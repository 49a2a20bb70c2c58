"""The bill beside the driver: seconds that ranks say they trained and sampled, and those in which NVML saw a kernel.

    python -m benchmarks.training.bill --size 1.5 --steps 20 --output bill.jsonl
    python -m benchmarks.training.bill --device cpu --size tiny --steps 2 --output /tmp/smoke.jsonl # no ratio

A job with Colocate by `grpo run` on one GPU, of which nothing else may use any. Its window begins and ends with a step,
after two that warm up, and before the job ends. In it are compared:

* what rank 0 reports of GPU seconds (`GpuUse`, from which the operator makes `status.usage`): training and sampling,
  and waiting, of which each step has a second at least, as the reward sleeps so long;
* the sum of NVML's utilization (the share of a moment in which any kernel ran), read ten times a second.

`ratio` is that of training and sampling together to what NVML counts. `phases` has both sides of each phase that the
rank was in: NVML looks back for up to a second, so that the end of a phase may count in the next one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.common.busy import gpu_handles, gpu_names, utilization
from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import about, append, measured, run_job
from grpo_spec.reports import GpuUse
from grpo_workload.reporting.progress_files import FILE_NAME, PHASES, read_progress

WARMUP = 2
READING_SECONDS = 0.1
LOOK_SECONDS = 0.02  # so that no phase of more than a moment is missed
REWARD_SECONDS = 1.0
PROMPTS, GENERATIONS = 8, 8
TOKENS = {"cuda": 512, "cpu": 16}  # of a completion


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps of the window.")
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True)
@click.option("--device", type=click.Choice(list(TOKENS)), default="cuda", show_default=True)
@click.option("--seconds", default=540, show_default=True, help="Longest time for the job.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("bill.jsonl"), show_default=True)
def main(steps: int, size: str, device: str, seconds: int, output: Path) -> None:
    """Run the job and append a line."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(Path(scratch) / "model", size, device, kind="qwen2").resolve()
        line: dict[str, Any] = {"size": size, "device": device, "steps": steps}
        line |= measured("bill", scratch, lambda folder: measure(folder, model, device, steps, seconds))
    line |= about("benchmarks.training.bill", device=device, size=size, steps=steps)
    line |= {"gpus": gpu_names() if device == "cuda" else []}
    append(output, line)
    print(json.dumps({name: value for name, value in line.items() if name != "spec"}), flush=True)
    sys.exit("error" in line)


def measure(folder: Path, model: Path, device: str, steps: int, seconds: float) -> dict[str, Any]:
    """Run the job and return both sides. Raises JobError as `run_job`."""
    rows = [{"prompt": f"{index:04d}".ljust(256, "x")} for index in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = spec(device, model, folder / "prompts.jsonl")
    with Watcher(folder, device) as watcher:
        # One more: a step has its line a moment before rank 0 reports what its GPU was used for.
        run_job(folder, job, WARMUP + steps + 1, seconds=seconds)
    return compare(watcher.seen, WARMUP, WARMUP + steps) | {"spec": job}


@dataclass(slots=True)
class Seen:
    """Observations of a job. Times are Unix times."""

    steps: dict[int, tuple[float, GpuUse]] = field(default_factory=dict)  # by their number: end, and use until then
    phases: list[tuple[float, str]] = field(default_factory=list)  # of rank 0: when it began
    readings: list[tuple[float, float]] = field(default_factory=list)  # share of busy time


class Watcher:
    """Looks at rank 0's files and at the GPU, in threads, from its begin to its end."""

    def __init__(self, folder: Path, device: str) -> None:
        self.seen, self._folder, self._over = Seen(), folder, threading.Event()
        self._handle = gpu_handles()[0] if device == "cuda" else None
        self._threads = [threading.Thread(target=self._look)]
        self._threads += [threading.Thread(target=self._read)] if self._handle is not None else []

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        while not self._over.wait(READING_SECONDS):
            self.seen.readings.append((time.time(), utilization(self._handle)))

    def _look(self) -> None:
        state: Path | None = None
        while not self._over.wait(LOOK_SECONDS):
            if state is None:
                state = next((file.parent for file in self._folder.glob(f"run/**/{FILE_NAME}")), None)
            else:
                self._look_at(state)

    def _look_at(self, state: Path) -> None:
        with (state / PHASES / "0").open() as file:
            began, phase = os.fstat(file.fileno()).st_mtime, file.read()
        if self.seen.phases[-1:] != [(began, phase)]:
            self.seen.phases.append((began, phase))
        progress = read_progress(state)
        if progress is not None and progress.gpu_use is not None and progress.step not in self.seen.steps:
            self.seen.steps[progress.step] = (time.time() - progress.age_seconds, progress.gpu_use)


def compare(seen: Seen, first: int, last: int) -> dict[str, Any]:
    """Return both sides from the end of step `first` to that of step `last`, counted from 1. Pure."""
    (begin, before), (end, after) = seen.steps[first], seen.steps[last]
    said = {name: getattr(after, name) - getattr(before, name) for name in ("training", "sampling", "waiting")}
    phases: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for seconds, phase in parts(seen.phases, begin, end):
        phases[phase][0] += seconds
    by_second: dict[int, float] = defaultdict(float)
    for (since, _), (until, share) in pairwise(seen.readings):
        for seconds, phase in parts(seen.phases, max(begin, since), min(end, until)):
            phases[phase][1] += seconds * share
            by_second[int(until - begin)] += seconds * share
    busy = sum(found for _, found in phases.values())
    return {
        "window_seconds": round(end - begin, 2),
        "said": {name: round(seconds, 2) for name, seconds in said.items()},
        "nvml_busy_seconds": round(busy, 2) if seen.readings else None,
        "ratio": round((said["training"] + said["sampling"]) / busy, 4) if busy else None,
        "phases": {
            name: {"seconds": round(seconds, 2), "nvml_busy_seconds": round(found, 2) if seen.readings else None}
            for name, (seconds, found) in phases.items()
        },
        "busy_percent_by_second": [round(100 * by_second[second]) for second in range(max(by_second, default=-1) + 1)],
    }


def parts(phases: Sequence[tuple[float, str]], begin: float, end: float) -> list[tuple[float, str]]:
    """Return the seconds of each phase between two times, in their order; none if `end` is not after `begin`."""
    ends = [*(began for began, _ in phases[1:]), float("inf")]
    cut = [(min(end, until) - max(begin, began), name) for (began, name), until in zip(phases, ends, strict=True)]
    return [(seconds, name) for seconds, name in cut if seconds > 0]


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that varies within each group, and leaves the GPU alone for a while."""
    time.sleep(REWARD_SECONDS)
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def spec(device: str, model: Path, prompts: Path) -> dict[str, Any]:
    """Spec of the job."""
    sequences = PROMPTS * GENERATIONS
    generation: dict[str, Any] = {"maxModelLen": 256 + TOKENS[device]}
    if device == "cuda":
        sizes = [1, 2, 4, *range(8, sequences + 1, 8)]
        graph = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        generation["engineArgs"] = {"max_num_seqs": sequences, "compilation_config": graph}
    else:
        generation |= {"engineArgs": {"enforce_eager": True}, "kvCacheMemory": "256Mi"}
    return {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"path": str(prompts)},
        "rewards": [{"name": "reward", "function": "benchmarks.training.bill:reward"}],
        "training": {
            "promptsPerStep": PROMPTS,
            "numGenerations": GENERATIONS,
            "maxSteps": 1000,
            "maxCompletionLength": TOKENS[device],
        },
        "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 540},
    }


if __name__ == "__main__":
    main()
