"""Tokens per second of whole steps by `training.maxStaleness`: how much of a step is waiting for long completions.

    python -m benchmarks.generation.staleness --row server:lognormal:0 --row server:lognormal:2 --output out.jsonl
    python -m benchmarks.generation.staleness --device cpu --size tiny --row server:lognormal:1 --output out.jsonl
    python -m benchmarks.generation.staleness --summary out.jsonl

A row is TOPOLOGY:LENGTHS:STALENESS, a job by `grpo run`. Topologies: server, one rank and one engine on a GPU each, or
server3+1, so many ranks and engines; colocate, one rank on one GPU; colocate2, two ranks, each on its own. Lengths:
lognormal, 64 to 2048 tokens, or equal, 512 tokens; the same in each step of each row (`benchmarks.common.lengths`). A
step trains on 64 completions of 8 prompts of 256 tokens.

Tokens per second are those of the measured steps' completions by the seconds of these steps. The first 2 + STALENESS
steps are not measured: they compile, and sampling ahead begins with them. Jobs would take more steps, so that the last
measured ones are sampled ahead too. `busy` is from 5 readings a second during the measured steps: how many processor
cores were in use, of those that this process may use, and the share of time in which each GPU ran any kernel.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.common.busy import Busy, gpu_names
from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS, Lengths, lengths, write_prompts
from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import REWARDS, about, append, measured, run_job

LONGEST = 2048
IN_FLIGHT = 320  # completions that an engine may sample at once: those of five steps
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, IN_FLIGHT + 1, 32)],
}
WARMUP = 2
SCALES = {"cuda": 1.0, "cpu": 1 / 32}  # of the lengths of completions
ENGINES: dict[str, dict[str, Any]] = {
    "cuda": {
        "engineArgs": {"max_num_seqs": IN_FLIGHT, "max_num_batched_tokens": 8192, "compilation_config": GRAPHS},
        "maxModelLen": PROMPT_TOKENS + LONGEST,
    },
    # One chunk: vLLM rewinds the random draws of all chunks but the last, which a CPU's generator cannot.
    "cpu": {
        "engineArgs": {"enforce_eager": True, "max_num_batched_tokens": 2 * 64 * PROMPT_TOKENS, "block_size": 128},
        "kvCacheMemory": "256Mi",
        "maxModelLen": 512,
    },
}
KEPT = (
    "time/",
    "staleness/",
    "engines/",
    "trained/sampling/",
    "completions/",
    "ranks/",
    "step_time",
    "tokens_per_second",
    "skipped",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one job."""

    name: str
    topology: str
    lengths: str
    staleness: int
    ranks: int
    engines: int  # 0: inside the ranks

    @classmethod
    def parse(cls, name: str) -> Row:
        """Parse TOPOLOGY:LENGTHS:STALENESS. Raises UsageError for a row that does not exist."""
        if not (row := re.fullmatch(r"(server|colocate)(?:(\d)(?:\+(\d))?)?:(lognormal|equal):(\d+)", name)):
            raise click.UsageError(
                f"--row {name}: use server, server3+1, colocate or colocate2; lognormal or equal; a number; with colons"
            )
        topology, ranks, engines, lengths, staleness = row.groups()
        return cls(
            name=name,
            topology=topology,
            lengths=lengths,
            staleness=int(staleness),
            ranks=int(ranks or 1),
            engines=int(engines or 1) if topology == "server" else 0,
        )


@click.command()
@click.option("--row", "names", multiple=True, help="TOPOLOGY:LENGTHS:STALENESS.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=6, show_default=True, help="Measured steps of a row, at least."
)
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True)
@click.option("--device", type=click.Choice(list(ENGINES)), default="cuda", show_default=True)
@click.option("--timeout", default=240, show_default=True, help="Longest time for one job, in seconds.")
@click.option("--quantization", help="vLLM's: fp8 for example. Without it engines have the weights in bfloat16.")
@click.option("--cores", help="Processor cores to use, as FIRST-LAST; all if not given.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the random model; made if missing.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("staleness.jsonl"), show_default=True)
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print results as a table and exit.")
def main(
    names: tuple[str, ...],
    steps: int,
    size: str,
    device: str,
    timeout: int,
    quantization: str | None,
    cores: str | None,
    model: Path | None,
    output: Path,
    summary: Path | None,
) -> None:
    """Run jobs one after the other and append a line for each."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
        return
    if not names:
        raise click.UsageError("one of --row and --summary is needed")
    rows = [Row.parse(name) for name in names]
    if cores is not None:
        first, last = map(int, cores.split("-"))
        os.sched_setaffinity(0, range(first, last + 1))
    failed = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(model or Path(scratch) / "model", size, device, kind="qwen2", max_length=4096).resolve()
        for row in rows:
            line: dict[str, Any] = {"row": row.name, "size": size, "device": device, "quantization": quantization}
            begun = time.monotonic()

            def measured_row(folder: Path, row: Row = row) -> Any:
                return measure(row, folder, model, steps, device, timeout, quantization)

            line |= measured(row.name, scratch, measured_row)
            failed += "error" in line
            line |= {"seconds": round(time.monotonic() - begun, 1), "host": host(device)}
            options = {"row": row.name, "steps": steps, "size": size, "device": device}
            options |= {"quantization": quantization} if quantization else {}
            line |= about("benchmarks.generation.staleness", **options)
            append(output, line)
            print(as_table([line]), flush=True)
    sys.exit(failed)


def measure(
    row: Row, folder: Path, model: Path, steps: int, device: str, timeout: int, quantization: str | None
) -> dict[str, Any]:
    """Run a row's job and return what was measured. Raises JobError as `run_job`."""
    scale, warmup = SCALES[device], WARMUP + row.staleness
    steps += -steps % (row.staleness + 1)  # whole cycles: Colocate may sample several steps in one
    job = spec(row, device, model, folder / "prompts.jsonl", int(LONGEST * scale))
    if quantization is not None:
        job["generation"]["engineArgs"] |= {"quantization": quantization}
    write_prompts(folder / "prompts.jsonl", warmup + steps + row.staleness + 2)
    busy = Busy(device, warmup)
    metrics = run_job(
        folder,
        job,
        warmup + steps,
        seconds=timeout,
        variables=Lengths(kind=row.lengths, scale=scale).variables(folder / "plugin"),
        watch=busy.look,
    )
    wanted = lengths(row.lengths, scale)
    for step in metrics:
        seen = step["completions/min_length"], step["completions/mean_length"], step["completions/max_length"]
        imposed = min(wanted), statistics.mean(wanted), max(wanted)
        assert seen == imposed, f"completions have {seen} tokens (min, mean, max), not {imposed}"
    return summarise(metrics, warmup) | {"busy": busy.means(), "spec": job}


def summarise(metrics: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """All steps, and means and tokens per second of the measured ones."""
    steps = [{name: value for name, value in row.items() if name.startswith(KEPT)} for row in metrics]
    counted = steps[warmup:]
    seconds = sum(step["step_time"] for step in counted)
    tokens = sum(step["tokens_per_second"] * step["step_time"] for step in counted)
    numbers = [name for name in counted[0] if all(isinstance(step.get(name), int | float) for step in counted)]
    return {
        "tokens_per_second": round(tokens / seconds),
        "tokens": round(tokens),
        "mean": {name: round(statistics.mean(step[name] for step in counted), 4) for name in numbers},
        "warmup": warmup,
        "steps": steps,
    }


def host(device: str) -> dict[str, Any]:
    """The machine, as far as it may matter."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": gpu_names() if device == "cuda" else [],
    }


def as_table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: one row per result, means of seconds by phase."""
    phases = ("step_time", "time/generate", "time/train", "time/sync", "staleness/mean", "staleness/max")
    table = [
        "| row | tokens/s | step s | generate s | train s | sync s | staleness | at most | GPUs busy | cores |",
        "|" + " --- |" * 10,
    ]
    for line in lines:
        if error := line.get("error"):
            table.append(f"| {line['row']} | failed: {error.splitlines()[0]} |" + " |" * 8)
            continue
        means = [line["mean"].get(name) for name in phases]
        name = " ".join(filter(None, [line["row"], line.get("quantization")]))
        cells = [name, f"{line['tokens_per_second']:,}"]
        cells += ["" if mean is None else f"{mean:.2f}" for mean in means]
        cells += [" ".join(f"{share:.0%}" for share in line["busy"]["gpus"]), f"{line['busy']['cores']:.1f}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def spec(row: Row, device: str, model: Path, prompts: Path, longest: int) -> dict[str, Any]:
    """Spec of the job that runs a row."""
    generation: dict[str, Any] = deepcopy(ENGINES[device])
    if row.topology == "server":
        groups = [{"name": f"e{number}", "gpus": 1} for number in range(row.engines)]
        generation |= {"topology": "Server", "server": {"groups": groups}}
    if device == "cuda":
        generation |= {"gpuMemoryUtilization": 0.6 if row.topology == "server" else 0.3}
    half = {"zeroStage": 0, "optimizerDtype": "bfloat16"}
    return {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"path": str(prompts)},
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": NUM_PROMPTS,
            "numGenerations": NUM_GENERATIONS,
            "maxSteps": 1000,
            "maxCompletionLength": longest,
            "maxStaleness": row.staleness,
        },
        "parallelism": half | {"gradientCheckpointing": True},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": row.ranks}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 300},
    }


if __name__ == "__main__":
    main()
