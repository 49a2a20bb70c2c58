"""A colocated engine's KV cache at long completions: what the trainer leaves of the GPU, beside a share of it.

    python -m benchmarks.generation.kv_cache --row rest --row 0.3 --output out.jsonl
    python -m benchmarks.generation.kv_cache --device cpu --size tiny --row rest --output out.jsonl

A row is a job by `grpo run` with one rank and its engine on one GPU: rest sets no size of the cache, 0.3 sets
generation.gpuMemoryUtilization. Its first step samples short completions (graphs, compilation), its second one the long
ones, all of the same length, and further steps short ones again. Measured: tokens that the cache holds, sequences that
lost their place in it (preemptions), tokens per second of sampling in the long step, and, over the steps after it, what
the driver counts beside torch while the engine sleeps. On CPUs the cache has a fixed size, and no engine sleeps.
A row of 32 x 32,768 tokens takes about ten minutes on an H100, more with 50 short steps; rows on GPUs of their own may
run at once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common import cache_watch
from benchmarks.common.busy import gpu_names
from benchmarks.common.lengths import NUM_PROMPTS, PROMPT_TOKENS, write_prompts
from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import REWARDS, about, append, measured, run_job

SHORT = {"cuda": 128, "cpu": 8}
LONGEST = {"cuda": 32_768, "cpu": 128}
GIB = 2**30


@click.command()
@click.option("--row", "rows", multiple=True, required=True, help="rest, or a share of the GPU such as 0.3.")
@click.option("--longest", type=click.IntRange(min=16), help="Tokens of a long completion; default by device.")
@click.option("--sequences", type=click.IntRange(min=16), default=32, show_default=True, help="A multiple of 8.")
@click.option("--short-steps", type=click.IntRange(min=1), default=50, show_default=True, help="After the long step.")
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True)
@click.option("--device", type=click.Choice(list(SHORT)), default="cuda", show_default=True)
@click.option("--timeout", default=540, show_default=True, help="Longest time for one job, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("kv_cache.jsonl"), show_default=True)
def main(
    rows: tuple[str, ...],
    longest: int | None,
    sequences: int,
    short_steps: int,
    size: str,
    device: str,
    timeout: int,
    output: Path,
) -> None:
    """Run jobs one after the other and append a line for each."""
    longest, failed = longest or LONGEST[device], 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        longer = PROMPT_TOKENS + longest
        model = make_model(Path(scratch) / "model", size, device, kind="qwen2", max_length=longer).resolve()
        for row in rows:
            job = spec(row, device, model, longest, sequences)

            def measured_row(folder: Path, job: dict[str, Any] = job) -> Any:
                return measure(folder, job, device, longest, sequences, short_steps, timeout)

            line: dict[str, Any] = {"row": row, "size": size, "device": device, "longest": longest}
            line |= {"sequences": sequences} | measured(row, scratch, measured_row)
            failed += "error" in line
            options = {"row": row, "longest": longest, "sequences": sequences, "short-steps": short_steps}
            line |= about("benchmarks.generation.kv_cache", **options, size=size, device=device)
            line |= {"gpus": gpu_names() if device == "cuda" else []}
            append(output, line)
            print(
                json.dumps({name: value for name, value in line.items() if name not in ("spec", "asleep")}), flush=True
            )
    sys.exit(failed)


def measure(
    folder: Path, job: dict[str, Any], device: str, longest: int, sequences: int, short_steps: int, timeout: int
) -> dict[str, Any]:
    """Run a job and return what was measured. Raises JobError as `run_job`."""
    write_prompts(folder / "prompts.jsonl", short_steps + 4)
    job["dataset"] = {"path": str(folder / "prompts.jsonl")}
    schedule = [(sequences, SHORT[device]), (sequences, longest), (sequences, SHORT[device])]
    variables = cache_watch.variables(folder / "plugin", schedule)
    metrics = run_job(folder, job, 2 + short_steps, least=2, seconds=timeout, variables=variables)
    lengths = [step["completions/mean_length"] for step in metrics[:3]]
    assert lengths == [tokens for _, tokens in schedule][: len(lengths)], lengths
    found = cache_watch.events(folder / "plugin")
    asleep = [value for name, value in found if name == "asleep"][1:]  # without that of the trial before the first step
    grown = max(asleep[2:], default=0) - asleep[0] if asleep else 0
    seconds = metrics[1]["time/generate"]
    return {
        "cache_tokens": next(value for name, value in found if name == "cache"),
        "preempted": sum(name == "preempted" for name, _ in found),
        "tokens_per_second": round(sequences * longest / seconds),
        "generate_seconds": round(seconds, 1),
        "step_seconds": round(metrics[1]["step_time"], 1),
        "steps": len(metrics),
        "grown_gib": round(grown / GIB, 3),
        "asleep": asleep,
        "spec": job,
    }


def spec(row: str, device: str, model: Path, longest: int, sequences: int) -> dict[str, Any]:
    """Spec of the job that runs a row, without its dataset."""
    graphs = [1, 2, 4, *range(8, sequences + 1, 8)]
    generation: dict[str, Any] = {"maxModelLen": PROMPT_TOKENS + longest}
    if device == "cuda":
        graph = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": graphs}
        generation["engineArgs"] = {"max_num_seqs": sequences, "compilation_config": graph}
        if row != "rest":
            generation["gpuMemoryUtilization"] = float(row)
    else:  # one chunk: vLLM rewinds the random draws of all chunks but the last, which a CPU's generator cannot
        chunk = 2 * sequences * PROMPT_TOKENS
        generation["engineArgs"] = {"enforce_eager": True, "max_num_batched_tokens": chunk, "block_size": 128}
        generation["kvCacheMemory"] = "256Mi"
    return {
        "device": {"type": device},
        "model": {"path": str(model)},
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": NUM_PROMPTS,
            "numGenerations": sequences // NUM_PROMPTS,
            "maxSteps": 1000,
            "maxCompletionLength": longest,
        },
        "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 540},
    }


if __name__ == "__main__":
    main()
