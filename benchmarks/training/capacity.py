"""Are plans right? 16 configurations from 0.5B to 7B on one GPU: planned and measured peaks of a training step.

    python -m benchmarks.training.capacity --output capacity.jsonl
    python -m benchmarks.training.capacity --device cpu --output /tmp/smoke.jsonl     # tiny models, no figures

Each runs in its own process: micro-batches of random tokens on the trainer's policy with an optimizer step in between,
without an engine. Measured is what torch allocates and reserves, and what the driver counts beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import config_of, write_weights
from benchmarks.common.runs import append, set_alone, versions

GIB = 2**30
HALF = {"zeroStage": 0, "optimizerDtype": "bfloat16"}
CHECKPOINTS = {"gradientCheckpointing": True}
LORA = {"r": 16, "alpha": 32}
CONFIGURATIONS: tuple[tuple[str, str, int, dict[str, Any], dict[str, Any] | None], ...] = (
    # size, family, tokens of a micro-batch, parallelism, lora
    ("0.5", "qwen2", 8192, {"zeroStage": 2}, None),
    ("0.5", "qwen2", 32768, {"zeroStage": 2} | CHECKPOINTS, None),
    ("0.5", "llama", 16384, HALF, None),
    ("0.5", "qwen3", 16384, {"zeroStage": 3} | CHECKPOINTS, None),
    ("1.5", "qwen2", 8192, {"zeroStage": 2}, None),
    ("1.5", "qwen2", 32768, {"zeroStage": 2} | CHECKPOINTS, None),
    ("1.5", "qwen2", 32768, {"zeroStage": 1} | CHECKPOINTS, None),
    ("1.5", "qwen2", 32768, {"zeroStage": 3} | CHECKPOINTS, None),
    ("1.5", "llama", 65536, HALF | CHECKPOINTS, None),
    ("1.5", "qwen3", 8192, HALF, LORA),
    ("3", "qwen2", 16384, HALF | CHECKPOINTS, None),
    ("3", "qwen2", 32768, {"zeroStage": 2, "offloadActivations": True} | CHECKPOINTS, None),
    ("3", "qwen3", 16384, {"zeroStage": 2}, LORA),
    ("7", "qwen2", 8192, HALF | CHECKPOINTS, None),
    ("7", "qwen2", 65536, HALF | CHECKPOINTS, LORA),
    ("7", "llama", 65536, HALF | CHECKPOINTS, LORA | {"loadIn4Bit": True}),
)
LENGTH = 1024  # tokens of a sequence; two micro-batches make a step


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("capacity.jsonl"), show_default=True)
@click.option("--only", type=int, multiple=True, help="Numbers of configurations; all without it.")
@click.option("--number", type=int, hidden=True)
def main(device: str, output: Path, only: tuple[int, ...], number: int | None) -> None:
    """Measure, and append a line for each configuration; one that fails gets its error."""
    if number is not None:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
            _measure(device, output, number, Path(scratch))
        return
    for one in only or range(len(CONFIGURATIONS)):
        command = [sys.executable, "-m", "benchmarks.training.capacity", "--device", device, "--output", str(output)]
        done = subprocess.run([*command, "--number", str(one)], capture_output=True, text=True)
        if done.returncode:
            append(output, {"number": one, "error": done.stderr.strip().splitlines()[-1:], "device": device})
        print(one, done.stdout.strip() or done.stderr.strip()[-500:], flush=True)


def _measure(device: str, output: Path, number: int, folder: Path) -> None:
    import torch

    set_alone()
    from grpo_spec.contract import Contract, Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    from grpo_workload.algorithm.loss import LossScale
    from grpo_workload.capacity.meta_pass import batch_of
    from grpo_workload.capacity.parts import TRAIN, UPDATE
    from grpo_workload.capacity.plan import plan
    from grpo_workload.capacity.shapes import Models
    from grpo_workload.policy.step.policy import Policy

    size, family, tokens, parallelism, lora = CONFIGURATIONS[number]
    if is_smoke := device == "cpu":
        size, tokens = "tiny", 64
    length = min(LENGTH, tokens // 2)
    _write_model(folder, size, family, device)
    config = {
        "model": {"path": str(folder)},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {
            "importanceSamplingCorrection": "none",
            "promptsPerStep": max(1, 2 * tokens // length // 2),
            "numGenerations": 2,
            "maxCompletionLength": length - 1,
            "maxTokensPerMicroBatch": tokens,
        },
        "parallelism": parallelism,
        "generation": {"engine": "Transformers", "maxModelLen": length},
    } | ({} if lora is None else {"lora": lora})
    member = {"pod": "p-0", "group": "g", "host": "h", "gpus": 1, "rankOffset": 0}
    job = {"namespace": "n", "name": "j", "uid": "u"}
    contract = Contract.model_validate(
        {"job": job, "attempt": 0, "device": device, "durable": True, "members": [member], "config": config}
    )
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else 80 * GIB
    made = plan(contract, total, Models())
    assert made.unknown is None, made.unknown
    parts = {phase: made.gpus[0].phases[phase] for phase in (TRAIN, UPDATE)}
    beside = ("CUDA context", "NCCL")
    planned = max(sum(size for name, size in one.items() if name not in beside) for one in parts.values())

    policy = Policy(contract.config, Device(device), timeout_seconds=60, pad_token_id=0)
    for step in range(2):  # AdamW's moments exist from its first step on
        if step == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        batches = [batch_of(tokens, length, "cpu") for _ in range(2)]
        policy.step(batches, 2, LossScale(num_sequences=2 * tokens // length, num_tokens=2 * tokens))
    line: dict[str, Any] = {"number": number, "size": size, "family": family, "tokens": tokens, "lora": lora}
    line |= {"parallelism": parallelism, "planned_gib": round(planned / GIB, 3), "fits": made.fits}
    line["parts_gib"] = {
        phase: {name: round(size / GIB, 3) for name, size in one.items() if size} for phase, one in parts.items()
    }
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        peak = torch.cuda.max_memory_allocated() / GIB
        line |= {"allocated_gib": round(peak, 3), "off": round(planned / GIB / peak - 1, 4)}
        line |= {"reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3)}
        line |= {"beside_torch_gib": round((total - free - reserved) / GIB, 3), "device": torch.cuda.get_device_name()}
    line |= {"versions": versions("torch", "transformers", "deepspeed", "peft"), "is_smoke": is_smoke}
    append(output, line)
    print(json.dumps({name: line.get(name) for name in ("size", "tokens", "planned_gib", "allocated_gib", "off")}))
    sys.stdout.flush()
    os._exit(0)


def _write_model(folder: Path, size: str, family: str, device: str) -> None:
    config = config_of(family, size, max_position_embeddings=4096, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    if family == "qwen3":
        config.head_dim = config.hidden_size // config.num_attention_heads
    write_weights(folder, config, device)


if __name__ == "__main__":
    main()
