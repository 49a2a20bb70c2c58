"""Tokens per second of whole steps for each way to share the same GPUs: Colocate with TP 1, 2 and 4, and Server.

    python -m benchmarks.generation.topologies --gpus 4 --shape colocate:1 --shape colocate:2 --shape colocate:4
        --shape server:3+1 --output out.jsonl
    python -m benchmarks.generation.topologies --device cpu --size tiny --gpus 3 --shape colocate:1
        --shape server:2+1 --output out.jsonl
    python -m benchmarks.generation.topologies --summary out.jsonl

Each shape is a job by `grpo run`: `--completions` per step of at most 512 tokens (random weights, so nearly all reach
it), ZeRO-2, moments in bfloat16, gradient checkpointing, sleep level 2, and a KV cache that takes what is left. Tokens
are those of completions, divided by the seconds of the whole step, by those in which the slowest rank generates, and
by those of training. A step lasts from its prompts to its metrics; medians leave out the first steps. A line is
written as soon as its job has ended, with the cause as `error` when the job did not take its steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import REWARDS, about, append, measured, run_job

GRAPHS: dict[str, Any] = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64],
}
WARMUP = 2


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of a step, and the settings of its engines."""

    generations: int  # of a prompt
    new_tokens: int
    engine: dict[str, Any]  # settings of `generation` for every topology


LOADS = {
    "cuda": Load(
        generations=8,
        new_tokens=512,
        engine={},
    ),
    "cpu": Load(
        generations=4,
        new_tokens=32,
        engine={"engineArgs": {"enforce_eager": True}, "kvCacheMemory": "64Mi"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to share the GPUs."""

    name: str
    ranks: int
    engines: int = 0  # each on its own GPU
    tensor_parallel: int = 1

    @classmethod
    def parse(cls, name: str, gpus: int) -> Shape:
        """Parse colocate:TENSOR_PARALLEL or server:RANKS+ENGINES for `gpus` GPUs.

        Raises UsageError when the text is neither, or does not fit.
        """
        kind, _, numbers = name.partition(":")
        parts = [int(part) for part in numbers.split("+") if part.isdigit() and int(part)]
        if kind == "colocate" and len(parts) == 1 and gpus % parts[0] == 0:
            return cls(name=name, ranks=gpus, tensor_parallel=parts[0])
        if kind == "server" and len(parts) == 2 and sum(parts) == gpus:
            return cls(name=name, ranks=parts[0], engines=parts[1])
        raise click.UsageError(
            f"--shape {name}: use colocate:N, where N divides {gpus}, or server:RANKS+ENGINES of {gpus} together"
        )


@click.command()
@click.option("--gpus", default=4, show_default=True)
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True)
@click.option("--device", type=click.Choice(list(LOADS)), default="cuda", show_default=True)
@click.option("--shape", "names", multiple=True, help="colocate:TENSOR_PARALLEL or server:RANKS+ENGINES.")
@click.option("--completions", default=64, show_default=True, help="Of a step; a multiple of a prompt's.")
@click.option("--steps", type=click.IntRange(min=WARMUP + 1), default=6, show_default=True)
@click.option("--timeout", default=240, show_default=True, help="Longest time for one job, in seconds.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of the random model; made if missing.",
)
@click.option("--output", type=click.Path(path_type=Path), default=Path("topologies.jsonl"), show_default=True)
@click.option(
    "--summary", type=click.Path(exists=True, path_type=Path), help="Print a file of results as a table and exit."
)
def main(
    gpus: int,
    size: str,
    device: str,
    names: tuple[str, ...],
    completions: int,
    steps: int,
    timeout: int,
    model: Path | None,
    output: Path,
    summary: Path | None,
) -> None:
    """Run jobs one after the other and append a line for each."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
        return
    if not names:
        raise click.UsageError("one of --shape and --summary is needed")
    each = LOADS[device].generations
    if completions < each or completions % each:
        raise click.UsageError(f"--completions {completions}: use a multiple of {each}, the completions of a prompt")
    shapes = [Shape.parse(name, gpus) for name in names]
    failed = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(model or Path(scratch) / "model", size, device, kind="qwen2", max_length=4096).resolve()
        for shape in shapes:
            line: dict[str, Any] = {"shape": shape.name, "gpus": gpus, "size": size, "device": device}
            line |= {"completions": completions}
            job = spec(shape, device, model, steps, completions)

            def measure(folder: Path, job: Any = job) -> Any:
                return summarise(run_job(folder, job, steps, seconds=timeout))

            line |= measured(shape.name, scratch, measure)
            failed += "error" in line
            options = {"gpus": gpus, "size": size, "device": device, "shape": shape.name}
            line |= about("benchmarks.generation.topologies", **options, completions=completions, steps=steps)
            append(output, line)
            print(as_table([line]), flush=True)
    sys.exit(failed)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All steps, and the medians of the measured ones."""
    phases = [name for name in rows[0] if name.startswith("time/")]
    kept = (*phases, "step_time", "ranks/generate_seconds/max", "tokens_per_second", "completions/mean_length")
    steps = [{name: row[name] for name in kept} for row in rows]
    counted = steps[WARMUP:]
    tokens = [step["tokens_per_second"] * step["step_time"] for step in counted]

    def speed(seconds: str) -> int:
        return round(statistics.median(count / step[seconds] for count, step in zip(tokens, counted, strict=True)))

    return {
        "tokens_per_second": {
            "step": speed("step_time"),
            "generate": speed("ranks/generate_seconds/max"),
            "train": speed("time/train"),
        },
        "median": {name: round(statistics.median(step[name] for step in counted), 3) for name in kept},
        "warmup": WARMUP,
        "steps": steps,
    }


def as_table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: one row per result, seconds by phase."""
    phases = ("time/generate", "time/train", "time/sync", "step_time")
    table = [
        "| GPUs | shape | completions | tokens/s | generating | training | generate s | train s | sync s | step s |",
        "|" + " --- |" * 10,
    ]
    for line in lines:
        first = [line["gpus"], line["shape"], line.get("completions", 64)]
        if error := line.get("error"):
            table.append(f"| {' | '.join(map(str, first))} | failed: {error.splitlines()[0]} |" + " |" * 6)
            continue
        speeds = line["tokens_per_second"]
        cells = [*first, *(f"{speeds[name]:,}" for name in ("step", "generate", "train"))]
        cells += [f"{line['median'][name]:.2f}" for name in phases]
        table.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(table)


def spec(shape: Shape, device: str, model: Path, steps: int, completions: int) -> dict[str, Any]:
    """Spec of the job that runs a shape."""
    load = LOADS[device]
    generation: dict[str, Any] = {"maxModelLen": 1024, **load.engine}
    if shape.engines:
        groups = [{"name": f"e{number}", "gpus": 1} for number in range(shape.engines)]
        generation |= {"topology": "Server", "server": {"groups": groups}}
    else:
        generation |= {"topology": "Colocate", "tensorParallel": shape.tensor_parallel}
    if device == "cuda":
        sizes = [*GRAPHS["cudagraph_capture_sizes"], *range(96, completions + 1, 32)]
        graphs = GRAPHS | {"cudagraph_capture_sizes": sizes}
        generation |= {"engineArgs": {"max_num_seqs": max(64, completions), "compilation_config": graphs}}
    return {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": completions // load.generations,
            "numGenerations": load.generations,
            "maxSteps": steps,
            "maxCompletionLength": load.new_tokens,
        },
        "parallelism": {"zeroStage": 2, "gradientCheckpointing": True, "optimizerDtype": "bfloat16"},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": shape.ranks}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 300},
    }


if __name__ == "__main__":
    main()
