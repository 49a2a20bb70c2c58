"""Seconds from an optimizer step until engines sample with its weights, over NCCL, in a real job by `grpo run`.

The model is a random Llama of about SIZE billion parameters: its bytes matter, its weights do not. Prints one JSON
line with the settings, versions and every sync, or with the cause as `error` when the job did not take its steps.
`median` leaves out the first sync, in which NCCL connects.

    python -m benchmarks.weights.weight_sync --size 1.5 --topology Server --ranks 1 --engine-gpus 1 --zero-stage 2
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import REWARDS, JobError, run_job, versions


def job(
    model: Path, topology: str, ranks: int, engine_gpus: int, zero_stage: int, steps: int, device: str
) -> dict[str, Any]:
    """Spec of the job: short completions, since only the sync is measured."""
    generation: dict[str, Any] = {
        "topology": topology,
        "maxModelLen": 512,
        "kvCacheMemory": "1Gi",
        "engineArgs": {"enforce_eager": True},
    }
    gpus = ranks
    if topology == "Server":
        generation["server"] = {"groups": [{"name": "engine", "gpus": engine_gpus}]}
        generation["tensorParallel"] = engine_gpus
    elif topology == "NodeLocal":
        generation["nodeLocal"] = {"gpusPerNode": engine_gpus, "enginesPerNode": engine_gpus}
        gpus += engine_gpus
    return {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": max(4, ranks),
            "numGenerations": 4,
            "perDeviceTrainBatchSize": 4,
            "maxSteps": steps,
            "maxCompletionLength": 32,
        },
        "parallelism": {"zeroStage": zero_stage, "gradientCheckpointing": True},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": gpus}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 500},
    }


@click.command()
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5")
@click.option("--topology", type=click.Choice(["Colocate", "Server", "NodeLocal"]), default="Server")
@click.option("--ranks", default=1)
@click.option("--engine-gpus", default=1)
@click.option("--zero-stage", default=2)
@click.option("--steps", type=click.IntRange(min=2), default=6)
@click.option("--timeout", default=180, help="Longest time for the job, in seconds.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
def main(
    size: str, topology: str, ranks: int, engine_gpus: int, zero_stage: int, steps: int, timeout: int, device: str
) -> None:
    """Run the job and print its sync times."""
    result: dict[str, Any] = {
        "size": size,
        "topology": topology,
        "ranks": ranks,
        "engine_gpus": engine_gpus,
        "zero_stage": zero_stage,
        "device": device,
        "versions": versions("torch", "vllm", "deepspeed", "transformers", "accelerate"),
        "command": " ".join(["python -m benchmarks.weights.weight_sync", *sys.argv[1:]]),
    }
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        folder = Path(scratch)
        spec = job(make_model(folder / "model", size, device), topology, ranks, engine_gpus, zero_stage, steps, device)
        try:
            metrics = run_job(folder, spec, steps, seconds=timeout)
        except JobError as error:
            print(json.dumps(result | {"error": error.reason}))
            sys.exit(str(error))
    syncs = [step["time/sync"] for step in metrics]
    result |= {
        "median": statistics.median(syncs[1:]),
        "syncs": syncs,
        "logp_difference_max": [step["trained/sampling/sampling_logp_difference/max"] for step in metrics],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
