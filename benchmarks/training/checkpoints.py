"""Seconds that training waits for a checkpoint: written before it goes on, and written meanwhile from a copy.

    nice python -m benchmarks.training.checkpoints
    python -m benchmarks.training.checkpoints --device cuda --size 1.5

A random model in bfloat16 under ZeRO-2. On CPUs, of SmolLM-135M's shape: with one rank, then with two. On a GPU, of
SIZE billion parameters, with one rank. Each saves its checkpoint in both ways, three times in turn, into a folder of
TMPDIR. Prints one JSON line for each save, in which `stall` is what training waits for (the copy and the publishing, or
all of it), and `writing` what the thread takes. The memory of the copy is allocated before, as in a run whose first
checkpoint comes some steps after its begin.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import SHAPES, make_model

REPETITIONS = 3
OPTIONS = "BENCH_OPTIONS"  # variable with the options of this program
RANK = "import sys; from benchmarks.training import checkpoints; checkpoints.run_rank(*sys.argv[1:])"


def run_rank(model: str, folder: str, device_type: str, way: str) -> None:
    """Save on one rank; rank 0 prints."""
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    device = Device(device_type)
    environment.prepare(device, os.environ)
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from benchmarks.common.busy import gpu_names
    from benchmarks.common.runs import versions
    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.storage.background import Background
    from grpo_workload.storage.checkpoint_content import SavedState
    from grpo_workload.storage.checkpoints import Checkpoints

    fields = {
        "model": {"path": model, "dtype": "bfloat16"},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "parallelism": {"zeroStage": 2},
    }
    policy = Policy(TrainerConfig.model_validate(fields), device, timeout_seconds=600, pad_token_id=2)
    take_step(policy)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ranks = dist.get_world_size()
    checkpoints = Checkpoints(Path(folder), f"ranks-{ranks}", keep=1, attempt=0, pod_uid="uid")
    background = Background(policy.device)
    copied = checkpoints.num_bytes(policy)
    if lacking := background.staging.reserve(copied):
        sys.exit(lacking)
    background.thread.submit(int).result()
    for step in range(2 * REPETITIONS) if way == "both" else range(1, 2 * REPETITIONS, 2):
        state = SavedState(step=step, weight_version=step, num_tokens=0, world_size=ranks, zero_stage=2)
        load = os.getloadavg()[0]
        dist.barrier()
        start = time.perf_counter()
        if step % 2:
            pending = checkpoints.begin(policy, tokenizer, state, background=background)
            copying = time.perf_counter() - start
            pending.writer.wait()
            dist.barrier()
            publishing_start = time.perf_counter()
            saved = pending.publish()
            publishing, writing = time.perf_counter() - publishing_start, pending.writer.seconds
            seconds = {"copying": copying, "publishing": publishing, "stall": copying + publishing, "writing": writing}
            background.staging.clear()
            background.thread.submit(int).result()  # old files are deleted
        else:
            saved = Path(folder) / checkpoints.save(policy, tokenizer, state)
            seconds = {"stall": time.perf_counter() - start}
        if dist.get_rank() == 0:
            size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
            row = {
                "ranks": ranks,
                "parameters": sum(one.numel() for one in policy.module.parameters()),
                "meanwhile": bool(step % 2),
                "repetition": step // 2,
                **{name: round(value, 3) for name, value in seconds.items()},
                "checkpoint_bytes": size,
                "copied_bytes_rank_0": copied,
                "load_average_before": round(load, 1),
                "cores": os.cpu_count(),
                "gpus": gpu_names() if device == Device.CUDA else [],
                "versions": versions("torch", "transformers", "deepspeed"),
                "command": " ".join(["python -m benchmarks.training.checkpoints", *shlex.split(os.environ[OPTIONS])]),
            }
            print(json.dumps(row), flush=True)
    background.end()


def take_step(policy: Any) -> None:
    """Take a small optimizer step, before which AdamW has no states."""
    import torch.distributed as dist

    from grpo_spec.training import TrainingConfig
    from grpo_workload.algorithm.samples import Completion, Prompt, Sample
    from grpo_workload.algorithm.step_plan import Fact, plan
    from grpo_workload.training.exchange import micro_batches

    answer = Completion(token_ids=(5, 6, 7), logprobs=(-5.0,) * 3, text="", finish_reason="stop", weight_version=0)
    sample = Sample(prompt=Prompt(index=0, text="", token_ids=(8, 9)), completion=answer, reward=1.0, advantage=0.5)
    work = plan([[Fact(2, 3, False, 1.0, 0.5)]] * dist.get_world_size(), TrainingConfig())
    policy.step(micro_batches(work, [sample], dist.get_rank()), work.num_micro_batches, work.scale)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True, help="With cuda.")
@click.option("--way", type=click.Choice(["both", "meanwhile"]), default="both", show_default=True)
def main(device: str, size: str, way: str) -> None:
    """Make the model, and start the ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        if device == "cuda":
            make_model(model, size, device, kind="qwen2")
        else:
            make_small_model(model)
        for count in (1, 2) if device == "cpu" else (1,):
            environ = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29547"}
            environ |= {OPTIONS: shlex.join(sys.argv[1:]), "LOCAL_WORLD_SIZE": str(count)}
            command = [sys.executable, "-c", RANK, str(model), scratch, device, way]
            ranks = [
                subprocess.Popen(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(count)
            ]
            if any([rank.wait() for rank in ranks]):
                sys.exit("a rank failed")


def make_small_model(folder: Path) -> None:
    """Write a random model of SmolLM-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.trainer.tiny_model import make_tiny_tokenizer

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
