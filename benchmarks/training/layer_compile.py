"""Is torch.compile faster than Liger's kernels? Forward and backward passes of the trainer's packed micro-batches.

    python -m benchmarks.training.layer_compile --output layer_compile.jsonl

One GPU, a random Qwen2 of SIZE billion parameters, gradient checkpointing, no engine and no optimizer step. A step is
64 completions after prompts of 256 tokens, in micro-batches of 8. Completions have 512 tokens each, or log-normal
lengths as in `trainer.py`, so that each micro-batch has another number of tokens. The decoder layers are compiled one
by one with dynamic shapes. Each kind of layer runs in its own process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common.lengths import lognormal
from benchmarks.common.metered import GIB, now
from benchmarks.common.models import make_model
from benchmarks.common.ours_micro import ours
from benchmarks.common.runs import append, versions

KINDS = ("liger", "plain", "compiled")
STEPS, MICRO = 64, 8


@click.command()
@click.option("--size", default="1.5", show_default=True, help="Billions of parameters, or tiny.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("layer_compile.jsonl"), show_default=True)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of the random model; made if missing.",
)
@click.option("--kind", type=click.Choice(KINDS), hidden=True)
def main(size: str, device: str, rounds: int, output: Path, model: Path | None, kind: str | None) -> None:
    """Measure every kind, and append a line for each."""
    if kind is not None:
        assert model is not None
        _measure(size, device, rounds, output, model, kind)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(model or Path(scratch) / "model", size, device, kind="qwen2", max_length=4096)
        arguments = [
            "--size",
            size,
            "--device",
            device,
            "--rounds",
            str(rounds),
            "--output",
            str(output),
            "--model",
            str(model),
        ]
        failed = [
            kind
            for kind in KINDS
            if subprocess.run(
                [sys.executable, "-m", "benchmarks.training.layer_compile", *arguments, "--kind", kind]
            ).returncode
        ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _measure(size: str, device: str, rounds: int, output: Path, model: Path, kind: str) -> None:
    import torch

    policy, micro = ours(model, device, liger=kind == "liger")
    if kind == "compiled":
        for layer in policy.module.get_decoder().layers:
            layer.compile(dynamic=True)
    drawn = lognormal(STEPS)
    lengths = {"equal": [512] * STEPS, "lognormal": drawn} if device == "cuda" else {"equal": [8] * STEPS}
    line: dict[str, Any] = {
        "kind": kind,
        "size": size,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    start = now()
    micro(next(iter(lengths.values()))[:MICRO])
    line["first_micro_batch_seconds"] = round(now() - start, 1)
    for name, completions in lengths.items():
        seconds = []
        for number in range(rounds + 1):  # the first is a warm-up
            if number == 1 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = now()
            for first in range(0, STEPS, MICRO):
                micro(completions[first : first + MICRO])
            seconds.append(round(now() - start, 4))
        peak = round(torch.cuda.max_memory_allocated() / GIB, 2) if device == "cuda" else None
        line[name] = {"median": statistics.median(seconds[1:]), "peak_gib": peak, "seconds": seconds}
    line["versions"] = versions(
        "torch", "transformers", "deepspeed", *(["liger_kernel"] if kind == "liger" and device == "cuda" else [])
    )
    line["command"] = f"python -m benchmarks.training.layer_compile --size {size} --device {device} --rounds {rounds}"
    append(output, line)
    print(json.dumps(line), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
