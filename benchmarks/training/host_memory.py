"""Host memory that ranks take to load a model, and to save a checkpoint for which training waits.

    nice python -m benchmarks.training.host_memory >> benchmarks/results/host_memory_cpu.jsonl

A random mixture of experts (Qwen3) in bfloat16 on two ranks of a CPU, under ZeRO-3 and ZeRO-2. Prints one JSON line for
each rank and stage. `loading` and `saving` are the largest growth of the process's own memory (RssAnon) meanwhile, and
`held` is the growth that stays after loading: on a CPU, weights or their parts. Pages of a file that is mapped
(`mapped`) are counted apart, since the kernel takes them back when memory is short. All in bytes.

What glibc keeps of freed weights below 32 MB counts as growth: on rank 0 under ZeRO-3, up to 300 MB of it. With
MALLOC_MMAP_THRESHOLD_=1048576 it keeps none, and that rank grows by 273 MB, where loading by layers took 304.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RANKS = 2
STAGES = (3, 2)
GATHER_BYTES = 2**24
"""In place of 256 MB, which would be most of this model."""
PAUSE = 0.002  # seconds between two looks at the memory
RANK = "import sys; from benchmarks.training import host_memory; host_memory.run_rank(*sys.argv[1:])"


def resident(kind: str) -> int:
    """Return the resident memory of this process of one kind (RssAnon, RssFile) in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return 1024 * int(line.split()[1])


def watched(action: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """Run `action`; return its result, and the largest growth of memory by kind."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the allocator would hide growth
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    most, is_over = dict(before), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for kind in most:
                most[kind] = max(most[kind], resident(kind))
            time.sleep(PAUSE)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        result = action()
    finally:
        is_over.set()
        thread.join()
    return result, {kind: most[kind] - before[kind] for kind in most}


def run_rank(model: str, folder: str, stage: str) -> None:
    """Load and save on one rank, and print what it took."""
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device.CPU, os.environ)
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from benchmarks.common.runs import versions
    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.policy.step import setup
    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.storage.checkpoint_content import SavedState
    from grpo_workload.storage.checkpoints import Checkpoints
    from grpo_workload.weights import export

    fields = {
        "model": {"path": model, "dtype": "bfloat16"},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "parallelism": {"zeroStage": int(stage)},
    }
    load: Any = vars(setup)["load_model"]
    found: dict[str, int] = {}

    def load_model(*args: Any) -> Any:
        before = resident("RssAnon")
        loaded, grown = watched(lambda: load(*args))
        ctypes.CDLL(None).malloc_trim(0)
        found.update(loading=grown["RssAnon"], mapped=grown["RssFile"], held=resident("RssAnon") - before)
        return loaded

    vars(setup)["load_model"] = load_model
    vars(export)["GATHER_BYTES"] = GATHER_BYTES
    config = TrainerConfig.model_validate(fields)
    policy = Policy(config, Device.CPU, timeout_seconds=600, pad_token_id=2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    checkpoints = Checkpoints(Path(folder), f"stage-{stage}", keep=1, attempt=0, pod_uid="uid")
    state = SavedState(step=1, weight_version=1, num_tokens=0, world_size=RANKS, zero_stage=int(stage))
    _, grown = watched(lambda: checkpoints.save(policy, tokenizer, state))
    row = {
        "stage": int(stage),
        "rank": dist.get_rank(),
        "model": sum(path.stat().st_size for path in Path(model).glob("*.safetensors")),
        **found,
        "saving": grown["RssAnon"],
        **versions("torch", "transformers", "deepspeed"),
    }
    for rank in range(RANKS):
        dist.barrier()
        if rank == dist.get_rank():
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def make_experts(folder: Path) -> None:
    """Write the model: six layers of 50 MB, almost all of it experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from support.trainer.tiny_model import make_tiny_tokenizer

    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        num_experts=64,
        num_experts_per_tok=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)


def main() -> None:
    """Make the model, and start the ranks of each stage."""
    from grpo_cli.local.processes import free_ports

    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        make_experts(model)
        for stage in STAGES:
            (port,) = free_ports(1)
            common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(model), place, str(stage)],
                    env=common
                    | {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(RANKS),
                        "LOCAL_WORLD_SIZE": str(RANKS),
                    },
                )
                for rank in range(RANKS)
            ]
            if any([rank.wait() for rank in ranks]):
                sys.exit("a rank failed")


if __name__ == "__main__":
    main()
