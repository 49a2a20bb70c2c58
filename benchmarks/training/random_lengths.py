"""Does a step run out of memory after the first? Many steps of random lengths, in micro-batches that a rank chooses.

    python -m benchmarks.training.random_lengths --output random_lengths.jsonl
    python -m benchmarks.training.random_lengths --device cpu --steps 3 --output /tmp/smoke.jsonl   # no memory figures

A random model of 0.1B, whose sequences are long: the trial of a start chooses the micro-batch from the `--room` that
other tensors leave on the GPU, and ends with the longest sequence. Then each step trains on 16 sequences, whose lengths
are log-uniform between 32 tokens and the longest, which one step in four has. A line has each step's tokens and peak.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import make_model
from benchmarks.common.runs import about, append, set_alone

GIB = 2**30
SEQUENCES, SHORTEST = 16, 32
PARALLELISM: dict[str, dict[str, Any]] = {
    "zero0": {"zeroStage": 0, "optimizerDtype": "bfloat16"},
    "zero2": {"zeroStage": 2},
    "zero3": {"zeroStage": 3},
}


@click.command()
@click.option("--steps", default=1000, show_default=True)
@click.option("--seconds", default=3600, show_default=True, help="No further step after so long.")
@click.option("--longest", default=16384, show_default=True, help="Tokens of the longest sequence.")
@click.option("--room", default=8.0, show_default=True, help="GiB that a micro-batch may take, and what stays free.")
@click.option("--kind", type=click.Choice(list(PARALLELISM)), default="zero2", show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("random_lengths.jsonl"), show_default=True)
def main(output: Path, **options: Any) -> None:
    """Train, and append a line; a step that runs out of memory ends the run and is the line's `error`."""
    if options["device"] == "cpu":
        options |= {"longest": min(options["longest"], 256)}
    set_alone()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        size = "0.1" if options["device"] == "cuda" else "tiny"
        model = make_model(
            Path(scratch) / "model", size, options["device"], kind="qwen2", max_length=options["longest"]
        )
        line = options | train(model, **options)
    line |= about("benchmarks.training.random_lengths", **options)
    append(output, line)
    print(json.dumps({name: value for name, value in line.items() if name not in ("tokens", "peaks_gib")}), flush=True)


def train(model: Path, steps: int, seconds: int, longest: int, room: float, kind: str, device: str) -> dict[str, Any]:
    """Return what was chosen, and tokens and peak of each step."""
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    import torch

    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.algorithm.step_plan import Fact, plan
    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.policy.trials.memory_trial import SPARE, CudaMemory, longest_sample, try_memory
    from grpo_workload.training.exchange import micro_batches

    fields = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {"maxCompletionLength": longest - SHORTEST // 2, "importanceSamplingCorrection": "none"},
        "parallelism": {"gradientCheckpointing": True, **PARALLELISM[kind]},
    }
    policy = Policy(TrainerConfig.model_validate(fields), Device(device), timeout_seconds=120, pad_token_id=2)
    found: dict[str, Any] = {}
    budget = 2 * longest
    if device == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        leave = int(SPARE * total + room * GIB)
        ballast = torch.empty(max(0, free - leave), dtype=torch.uint8, device="cuda")
        sample = longest_sample(policy, longest, longest - SHORTEST // 2, None)
        choice = try_memory(policy, CudaMemory(policy), sample, most=10**6, fixed=None, halvings=0)
        budget = choice.tokens
        found = {"gpu": torch.cuda.get_device_name(), "ballast_gib": round(ballast.nbytes / GIB, 2)}
        found |= {"free_gib": round(choice.room / GIB, 3), "longest_takes_gib": round(choice.longest / GIB, 3)}
    fields["training"]["maxTokensPerMicroBatch"] = budget  # type: ignore[index]
    training = TrainerConfig.model_validate(fields).training
    end = time.monotonic() + seconds
    draw, tokens, peaks, num_micro_batches = random.Random(0), [], [], []
    for step in range(steps):
        if time.monotonic() > end:
            break
        lengths = [round(math.exp(draw.uniform(math.log(SHORTEST), math.log(longest)))) for _ in range(SEQUENCES)]
        if draw.random() < 0.25:
            lengths[0] = longest
        samples = [longest_sample(policy, length, length - SHORTEST // 2, None) for length in lengths]
        facts = [Fact(SHORTEST // 2, length - SHORTEST // 2, False, 0.0, 1.0) for length in lengths]
        made = plan([facts], training)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            update = policy.step(micro_batches(made, samples, 0), made.num_micro_batches, made.scale)
        except Exception as error:
            found |= {"error": f"step {step}: {type(error).__name__}: {error}", "lengths": lengths}
            break
        assert update["skipped"] == 0, update
        tokens.append(sum(lengths))
        num_micro_batches.append(made.num_micro_batches)
        if device == "cuda":
            peaks.append(round(torch.cuda.max_memory_reserved() / GIB, 3))
    found |= {"micro_batch_tokens": budget, "steps_taken": len(tokens), "micro_batches": sum(num_micro_batches)}
    if peaks:
        found |= {"peak_gib": max(peaks), "peak_at_step": peaks.index(max(peaks)), "first_step_gib": peaks[0]}
        found |= {"free_at_end_gib": round(torch.cuda.mem_get_info()[0] / GIB, 2)}
    return found | {"tokens": tokens, "peaks_gib": peaks}


if __name__ == "__main__":
    main()
