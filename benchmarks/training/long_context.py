"""Speed and memory of training on one long sequence on one GPU: tiles in MLPs or not, attention by cuDNN or not.

    python -m benchmarks.training.long_context --list
    python -m benchmarks.training.long_context --output long_context.jsonl --only 4b --only 4b-offloaded
    python -m benchmarks.training.long_context --device cpu --size tiny --output /tmp/smoke.jsonl     # no figures

Each configuration runs in its own process: optimizer steps on one sequence of random tokens on the trainer's policy,
with gradient checkpointing, on random weights of Qwen3's shapes. A line has the seconds of each step after a warm-up,
tokens per second by their median, the peaks of what torch allocates and reserves, beside the plan, and MFU. That counts
each product of the forward pass once, and those of the backward pass that the training needs; nothing for computing
again. With an engine, what vLLM keeps while it sleeps is set aside: its weights are on the host.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.common import one_sequence
from benchmarks.common.models import SHAPES, VOCABULARY, config_of, write_weights
from benchmarks.common.one_sequence import GIB
from benchmarks.common.runs import about, append, set_alone

PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, dense
LORA = {"r": 16, "alpha": 32}
IN_4_BITS = LORA | {"loadIn4Bit": True}
HEAD_SIZE, WARM_UP = 128, 2048


class Configuration(NamedTuple):
    """A model, its settings, and the length of the sequence that it is trained on."""

    size: str
    tokens: int
    lora: dict[str, Any] | None
    offloads: bool = False
    tiled: bool = True
    engine: bool = False
    steps: int = 3
    cudnn: bool = True


CONFIGURATIONS = {
    "4b": Configuration("4", 65_536, LORA),
    "4b-offloaded": Configuration("4", 65_536, LORA, offloads=True),
    "4b-whole": Configuration("4", 65_536, LORA, tiled=False),
    "4b-flash2": Configuration("4", 65_536, LORA, cudnn=False),
    "4b-offloaded-flash2": Configuration("4", 65_536, LORA, offloads=True, cudnn=False),
    "4b-offloaded-whole": Configuration("4", 65_536, LORA, offloads=True, tiled=False),
    "0.6b-16k": Configuration("0.6", 16_384, None),
    "0.6b-64k": Configuration("0.6", 65_536, None),
    "8b-110k": Configuration("8", 110_000, IN_4_BITS, offloads=True, engine=True, steps=1),
    "8b-160k": Configuration("8", 160_000, IN_4_BITS, offloads=True, engine=True, steps=1),
    "8b-220k": Configuration("8", 220_000, IN_4_BITS, offloads=True, engine=True, steps=1),
    "8b-110k-whole": Configuration("8", 110_000, IN_4_BITS, offloads=True, tiled=False, engine=True, steps=1),
    "8b-220k-whole": Configuration("8", 220_000, IN_4_BITS, offloads=True, tiled=False, engine=True, steps=1),
}
"""With one step, the warm-up is a short sequence."""


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(list(SHAPES)), help="A model of this size in place of all.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("long_context.jsonl"), show_default=True)
@click.option("--only", type=click.Choice(list(CONFIGURATIONS)), multiple=True, help="All without it.")
@click.option("--list", "lists", is_flag=True, help="Say what there is, and end.")
@click.option("--models", type=click.Path(path_type=Path), hidden=True)
def main(device: str, size: str | None, output: Path, only: tuple[str, ...], lists: bool, models: Path | None) -> None:
    """Measure, and append a line for each configuration; one that fails gets its error."""
    if lists:
        print("\n".join(f"{name}: {one}" for name, one in CONFIGURATIONS.items()))
        return
    if models is not None:
        (name,) = only
        measure(name, device, size, output, models)
        return
    options = {"device": device} | ({"size": size} if size else {})
    command = [sys.executable, "-m", "benchmarks.training.long_context", "--output", str(output)]
    command += [one for name, value in options.items() for one in (f"--{name}", value)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        for name in only or CONFIGURATIONS:
            done = subprocess.run([*command, "--only", name, "--models", scratch], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                error = done.stderr.strip().splitlines()[-1:]
                append(output, {"name": name, **CONFIGURATIONS[name]._asdict(), "error": error, **options})
                print(name, done.stderr.strip()[-500:], flush=True)


def measure(name: str, device: str, size: str | None, output: Path, models: Path) -> None:
    """Run one configuration in this process, which then ends."""
    import torch

    set_alone()
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    from grpo_workload.capacity.parts import ENGINE_PROFILE
    from grpo_workload.policy.model import attention_kernels, tiles
    from grpo_workload.policy.step.policy import Policy

    one = CONFIGURATIONS[name]
    one = one._replace(size=size or one.size, tokens=one.tokens if device == "cuda" else 600)
    if not one.tiled or device == "cpu":
        tiles.TILE = 256 if one.tiled else one.tokens
    if not one.cudnn:
        attention_kernels.LONG = one.tokens + 1
    folder = models / one.size
    if not folder.exists():
        limits = {"max_position_embeddings": 262_144, "head_dim": HEAD_SIZE, "pad_token_id": 0}
        write_weights(folder, config_of("qwen3", one.size, bos_token_id=None, eos_token_id=None, **limits), device)
    states: dict[str, Any] = {"zeroStage": 0, "optimizerDtype": "bfloat16"} if one.lora else {"zeroStage": 2}
    states |= {"offloadActivations": one.offloads and device == "cuda"}
    job = one_sequence.contract(folder, device, one.tokens, states, one.lora)
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else 80 * GIB
    plan = one_sequence.planned(job, total)
    if one.engine and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1 - ENGINE_PROFILE / total)

    policy = Policy(job.config, Device(device), timeout_seconds=60, pad_token_id=0)

    one_sequence.timed_step(policy, one.tokens if one.steps > 1 else min(WARM_UP, one.tokens))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [one_sequence.timed_step(policy, one.tokens)[0] for _ in range(one.steps)]
    median = statistics.median(seconds)
    line: dict[str, Any] = {"name": name, **one._asdict(), "seconds": [round(each, 3) for each in seconds]}
    line |= {"tokens_per_second": round(one.tokens / median, 1)} | plan
    if device == "cuda":
        line |= {"allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3)}
        line |= {"reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3)}
        line |= {"mfu": round(flops(one) / median / PEAK_FLOPS, 4), "gpu": torch.cuda.get_device_name()}
    line |= about("benchmarks.training.long_context", only=name) | {"is_smoke": device == "cpu"}
    append(output, line)
    shown = ("name", "error", "seconds", "tokens_per_second", "mfu", "allocated_gib", "reserved_gib", "planned_gib")
    print(json.dumps({key: line[key] for key in shown if key in line}))
    sys.stdout.flush()
    os._exit(0)


def flops(one: Configuration) -> float:
    """Return the floating point operations that a step needs."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[one.size]
    projections = 2 * hidden * HEAD_SIZE * (heads + kv_heads) + 3 * hidden * intermediate
    weights = layers * projections + hidden * VOCABULARY
    passes = 2 if one.lora else 3  # forward, the inputs' gradients, and the weights'
    attended = layers * heads * HEAD_SIZE * one.tokens  # causal: half of all pairs, in two products
    return one.tokens * 2 * (weights * passes + attended * 3)


if __name__ == "__main__":
    main()
