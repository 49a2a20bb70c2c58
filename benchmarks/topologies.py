"""Tokens per second of whole steps in every way to share the same GPUs: Colocate with tensor parallel 1, 2, 4, and Server; by `grpo run`.

    python benchmarks/topologies.py --gpus 4 --size 1.5 --shape colocate:1 --shape colocate:2 --shape server:3+1 --output topologies.jsonl

64 completions a step of at most 512 tokens each, random weights, so that nearly all reach it; ZeRO-2, gradient checkpointing, sleep level
2. Tokens are those of completions; a step lasts from the end of one to the end of the next. The median leaves the first steps out.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from models import make_model
from runs import JobError, run_job

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64]}
WARMUP, PROMPTS, GENERATIONS, NEW_TOKENS = 2, 8, 8, 512


@click.command()
@click.option("--gpus", default=4, show_default=True)
@click.option("--size", default="1.5", show_default=True)
@click.option("--shape", "shapes", multiple=True, required=True, help="colocate:TENSOR_PARALLEL or server:RANKS+ENGINES.")
@click.option("--steps", default=6, show_default=True)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the random model, which is made where it is not there yet.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("topologies.jsonl"), show_default=True)
def main(gpus: int, size: str, shapes: tuple[str, ...], steps: int, model: Path | None, output: Path) -> None:
    """Run jobs one after the other and append a line for each."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = model or Path(scratch) / "model"
        if not model.exists():
            from transformers import Qwen2Config

            make_model(model, size, "cuda", config_class=Qwen2Config, max_length=4096)
        for shape in shapes:
            folder = Path(scratch) / shape.replace(":", "-").replace("+", "-")
            folder.mkdir()
            try:
                rows = run_job(folder, _spec(shape, gpus, model, steps), steps)
            except JobError as error:
                print(f"FAILED {shape}: {error}", flush=True)  # noqa: T201
                continue
            line = {"shape": shape, "gpus": gpus, "size": size, **_summary(rows[WARMUP:])}
            line["versions"] = {name: version(name) for name in ("torch", "vllm", "deepspeed", "transformers")}
            line["command"] = f"python benchmarks/topologies.py --gpus {gpus} --size {size} --shape {shape} --steps {steps}"
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(shape, gpus, size, line["tokens_per_second"], line["median"], flush=True)  # noqa: T201


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    parts = ("time/generate", "time/gather", "time/train", "time/sync", "step_time")
    return {
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
        "median": {name: round(statistics.median(row[name] for row in rows), 3) for name in parts},
        "steps": [{name: row[name] for name in (*parts, "tokens_per_second", "completions/mean_length")} for row in rows],
    }


def _spec(shape: str, gpus: int, model: Path, steps: int) -> dict[str, Any]:
    kind, _, numbers = shape.partition(":")
    generation: dict[str, Any] = {"maxModelLen": 1024, "engineArgs": {"max_num_seqs": 64, "compilation_config": GRAPHS}}
    ranks = gpus
    if kind == "server":
        ranks, engines = map(int, numbers.split("+"))
        assert ranks + engines == gpus, shape
        generation |= {"topology": "Server", "gpuMemoryUtilization": 0.6}
        generation["server"] = {"groups": [{"name": f"e{number}", "gpus": 1} for number in range(engines)]}
    else:
        generation |= {"topology": "Colocate", "tensorParallel": int(numbers), "gpuMemoryUtilization": 0.3}
    return {
        "device": {"type": "cuda"},
        "model": {"path": str(model)},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": [{"name": "reward", "function": "metered:reward"}],  # which varies within a group
        "training": {
            "promptsPerStep": PROMPTS,
            "numGenerations": GENERATIONS,
            "maxSteps": steps,
            "maxCompletionLength": NEW_TOKENS,
        },
        "parallelism": {"zeroStage": 2, "gradientCheckpointing": True},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": ranks}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 300},
    }


if __name__ == "__main__":
    main()
