"""Speed and memory of training on one long sequence that several GPUs share, beside one GPU.

    python -m benchmarks.training.sequence_ranks --list
    python -m benchmarks.training.sequence_ranks --output sequence_ranks.jsonl --only 7b-64k --only 7b-128k
    python -m benchmarks.training.sequence_ranks --device cpu --size tiny --output /tmp/smoke.jsonl     # no figures

Each configuration runs with each number of ranks, which all share the sequence (`parallelism.sequence`): optimizer
steps on random tokens on the trainer's policy, with gradient checkpointing and on random weights of Qwen2.5's shapes,
or Qwen3's. A line has the seconds of each step after a warm-up, tokens per second by their median, the peaks of what
torch allocates and reserves on each GPU, beside the plan, and the loss and gradient norm of each step, which all
numbers of ranks share but for rounding.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.common import one_sequence
from benchmarks.common.models import SHAPES, config_of, write_weights
from benchmarks.common.one_sequence import GIB
from benchmarks.common.processes import run_ranks
from benchmarks.common.runs import about, append

MODULE = "benchmarks.training.sequence_ranks"
LORA = {"r": 16, "alpha": 32}
CPU_TOKENS = 600


class Configuration(NamedTuple):
    """A model with adapters, and the length of the sequence that it is trained on."""

    size: str
    tokens: int
    offloads: bool = False
    zero_stage: int = 0
    steps: int = 3
    family: str = "qwen2"


CONFIGURATIONS = {
    "7b-64k": Configuration("7", 65_536),
    "7b-128k": Configuration("7", 131_072),
    "7b-128k-offloaded": Configuration("7", 131_072, offloads=True),
    "7b-64k-zero3": Configuration("7", 65_536, zero_stage=3),
    "7b-256k": Configuration("7", 262_144, steps=1),
    "4b-64k": Configuration("4", 65_536, family="qwen3"),
    "4b-256k": Configuration("4", 262_144, steps=1, family="qwen3"),
}


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(list(SHAPES)), help="A model of this size in place of all.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("sequence_ranks.jsonl"), show_default=True)
@click.option("--only", type=click.Choice(list(CONFIGURATIONS)), multiple=True, help="All without it.")
@click.option("--ranks", type=int, multiple=True, default=(1, 2), show_default=True)
@click.option("--seconds", type=int, default=1200, show_default=True, help="That one run may take.")
@click.option("--list", "lists", is_flag=True, help="Say what there is, and end.")
@click.option("--models", type=click.Path(path_type=Path), hidden=True)
def main(
    device: str,
    size: str | None,
    output: Path,
    only: tuple[str, ...],
    ranks: tuple[int, ...],
    seconds: int,
    lists: bool,
    models: Path | None,
) -> None:
    """Measure, and append a line for each configuration and number of ranks; one that fails gets its error."""
    if lists:
        print("\n".join(f"{name}: {one}" for name, one in CONFIGURATIONS.items()))
        return
    if models is not None:
        measure(only[0], device, size, output, models)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        for name in only or CONFIGURATIONS:
            for count in ranks:
                options = ["--device", device, "--output", str(output), "--only", name, "--models", scratch]
                error = run_ranks(
                    MODULE, count, [*options, *(["--size", size] if size else [])], Path(scratch), seconds
                )
                if error is not None:
                    line = {"name": name, **CONFIGURATIONS[name]._asdict(), "ranks": count, "device": device}
                    append(output, line | {"error": error.splitlines()[-1:]})
                    print(name, count, error, flush=True)


def measure(name: str, device: str, size: str | None, output: Path, models: Path) -> None:
    """Run one configuration as one of its ranks, in this process, which then ends."""
    import torch

    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    import torch.distributed as dist

    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.ranks.collectives import gather, join, on_main

    one, is_gpu = CONFIGURATIONS[name], device == "cuda"
    one = one._replace(size=size or one.size, tokens=one.tokens if is_gpu else CPU_TOKENS)
    own = join(Device(device), 600)
    ranks, folder = dist.get_world_size(), models / one.size

    def write() -> None:
        if not folder.exists():
            torch.manual_seed(0)
            limits: dict[str, Any] = {"max_position_embeddings": 262_144, "pad_token_id": 0}
            limits |= {"head_dim": 128} if one.family == "qwen3" else {}
            config = config_of(one.family, one.size, bos_token_id=None, eos_token_id=None, **limits)
            write_weights(folder, config, device)

    on_main(write)
    parallelism = {"zeroStage": one.zero_stage, "optimizerDtype": "bfloat16", "sequence": ranks}
    parallelism |= {"offloadActivations": one.offloads and is_gpu}
    job = one_sequence.contract(folder, device, one.tokens, parallelism, LORA, gpus=ranks)
    plan = one_sequence.planned(job, torch.cuda.mem_get_info()[1] if is_gpu else 80 * GIB)

    torch.manual_seed(0)  # adapters
    policy = Policy(job.config, Device(device), timeout_seconds=600, pad_token_id=0)
    metrics: list[dict[str, float]] = []

    def step() -> float:
        dist.barrier()
        taken, found = one_sequence.timed_step(policy, one.tokens)
        metrics.append(found)
        return taken

    step()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [step() for _ in range(one.steps)]
    peaks = (torch.cuda.max_memory_allocated(own), torch.cuda.max_memory_reserved(own)) if is_gpu else (0, 0)
    allocated, reserved = zip(*gather(peaks), strict=True)
    line: dict[str, Any] = {"name": name, **one._asdict(), "ranks": ranks, "seconds": [round(s, 3) for s in seconds]}
    line |= {"tokens_per_second": round(one.tokens / statistics.median(seconds), 1)} | plan
    line |= {what: [one_step[what] for one_step in metrics] for what in ("loss", "grad_norm")}
    if is_gpu:
        line |= {"allocated_gib": [round(size / GIB, 3) for size in allocated]}
        line |= {"reserved_gib": [round(size / GIB, 3) for size in reserved], "gpu": torch.cuda.get_device_name()}
    line |= about(MODULE, only=name, ranks=ranks) | {"is_smoke": not is_gpu}
    if dist.get_rank() == 0:
        append(output, line)
        shown = ("name", "ranks", "seconds", "tokens_per_second", "allocated_gib", "planned_gib", "grad_norm")
        print(json.dumps({key: line[key] for key in shown if key in line}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
