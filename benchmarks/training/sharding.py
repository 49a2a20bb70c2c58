"""Seconds of one optimizer step of a model whose weights two or more GPUs share: ZeRO-3, FSDP2 and AutoTP.

    python -m benchmarks.training.sharding --output sharding.jsonl
    python -m benchmarks.training.sharding --device cpu --size tiny --output /tmp/smoke.jsonl     # no figures

All sides train the same random model on the same tokens: transformers' model with gradient checkpointing, Liger's
fused layers and cross-entropy on a GPU, fused AdamW on weights and moments in bfloat16, gradients clipped. Only what
shards it differs: DeepSpeed's ZeRO-3 as a job configures it (`zeroStage: 3`, `optimizerDtype: bfloat16`), the same with
gradients that are reduced once a step (`coalesceGradReduction`), torch's `fully_shard` of each layer and the whole,
which also reduces them once, and DeepSpeed's tensor parallelism. Each rank has its own micro-batches; with AutoTP, all
ranks share each micro-batch, so there are as many micro-batches more.

A line has the seconds of each step, tokens per second of all ranks by their median, the loss of each step, which all
sides must share but for rounding, and the peak that torch reserves on each GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import SHAPES, config_of, write_weights
from benchmarks.common.one_sequence import GIB, contract
from benchmarks.common.processes import run_ranks
from benchmarks.common.runs import about, append

MODULE = "benchmarks.training.sharding"
SIDES = ("zero3", "zero3_coalesced", "fsdp2", "autotp")
LEARNING_RATE, MAX_NORM, WARMUP = 1e-6, 1.0, 2


@click.command(help=__doc__)
@click.option("--side", type=click.Choice(SIDES), multiple=True, default=SIDES, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--size", type=click.Choice(list(SHAPES)), default="7", show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="Of a sequence.")
@click.option("--sequences", default=4, show_default=True, help="Of a micro-batch.")
@click.option("--micro-batches", default=4, show_default=True, help="Of a rank in a step.")
@click.option("--steps", default=5, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--seconds", default=240, show_default=True, help="That one side may take.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("sharding.jsonl"), show_default=True)
@click.option("--model", type=click.Path(path_type=Path), hidden=True)
def main(side: tuple[str, ...], seconds: int, output: Path, model: Path | None, **options: Any) -> None:
    if model is not None:
        measure(side[0], model, output, **options)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        device, size, ranks = options["device"], options["size"], options["ranks"]
        write_weights(folder := Path(scratch) / "model", _config(size), device)
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        failed = False
        for one in side:
            own = [f"--side={one}", f"--model={folder}", f"--output={output.resolve()}"]
            error = run_ranks(MODULE, ranks, [*given, *own], Path(scratch), seconds)
            if error is not None:
                append(output, {"side": one, **options, "error": error.splitlines()[-1:]})
                print(one, error, file=sys.stderr, flush=True)
                failed = True
        sys.exit(failed)


def _config(size: str) -> Any:
    return config_of("qwen2", size, bos_token_id=None, eos_token_id=None, pad_token_id=0, max_position_embeddings=8192)


def measure(
    side: str,
    model: Path,
    output: Path,
    *,
    ranks: int,
    size: str,
    tokens: int,
    sequences: int,
    micro_batches: int,
    steps: int,
    device: str,
) -> None:
    """Take the steps of a side as one of its ranks, in this process, which then ends."""
    import torch
    import torch.distributed as dist

    from grpo_spec.contract import Device
    from grpo_workload.ranks.collectives import gather, join

    own, is_gpu = join(Device(device), 600), device == "cuda"
    rank, shares_batches = dist.get_rank(), side == "autotp"
    draw = torch.Generator().manual_seed(0)
    batches = torch.randint(0, 512, (ranks * micro_batches, sequences, tokens), generator=draw)
    mine = batches if shares_batches else batches[rank::ranks]
    sides: dict[str, Callable[..., Step]] = {
        "zero3": _zero3,
        "zero3_coalesced": partial(_zero3, coalesces=True),
        "fsdp2": _fsdp2,
        "autotp": _autotp,
    }
    step = sides[side](model, device, own, len(mine))

    def timed() -> tuple[float, float]:
        dist.barrier()
        begin = time.monotonic()
        loss = step([batch.to(own) for batch in mine])
        if is_gpu:
            torch.cuda.synchronize()
        return time.monotonic() - begin, loss

    for _ in range(WARMUP):
        timed()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken = [timed() for _ in range(steps)]
    found = gather((taken, torch.cuda.max_memory_reserved(own) if is_gpu else 0))
    seconds = [max(one[index][0] for one, _ in found) for index in range(steps)]
    losses = [statistics.fmean(one[index][1] for one, _ in found) for index in range(steps)]
    shape = {"size": size, "ranks": ranks, "tokens": tokens, "sequences": sequences, "micro_batches": micro_batches}
    line: dict[str, Any] = {"side": side, **shape, "seconds": [round(one, 3) for one in seconds]}
    line |= {"tokens_per_second": round(batches.numel() / statistics.median(seconds), 1), "loss": losses}
    line |= {"reserved_gib": [round(peak / GIB, 2) for _, peak in found]} if is_gpu else {}
    line |= {"gpu": torch.cuda.get_device_name(), "load": os.getloadavg()[0], "cpus": os.cpu_count()} if is_gpu else {}
    line |= about(MODULE, side=side, device=device, steps=steps, **shape) | {"is_smoke": not is_gpu}
    if rank == 0:
        append(output, line)
        print(json.dumps({key: line[key] for key in ("side", "seconds", "tokens_per_second", "loss")}), flush=True)
    dist.barrier()
    os._exit(0)


def _load(model: Path, device: str, own: Any) -> Any:
    """Return the model for training: in bfloat16 with gradient checkpointing, and Liger's layers on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    if device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map={"": own})
    loaded.config.use_cache = False
    loaded.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return loaded.train()


def _adam(model: Any, device: str) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=device == "cuda")


Step = Callable[[list[Any]], float]
"""Takes an optimizer step on micro-batches of tokens, and returns their mean loss."""


def _zero3(model: Path, device: str, own: Any, count: int, *, coalesces: bool = False) -> Step:
    from grpo_spec.deepspeed_config import deepspeed_config

    parallelism = {"zeroStage": 3, "optimizerDtype": "bfloat16"}
    config = deepspeed_config(contract(model, device, 8, parallelism, None).config)
    return _deepspeed(model, device, own, count, config, coalesces=coalesces)


def _autotp(model: Path, device: str, own: Any, count: int) -> Step:
    import torch.distributed as dist

    ranks = dist.get_world_size()
    tensor_parallel = {"tensor_parallel": {"autotp_size": ranks}, "zero_optimization": {"stage": 1}}
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    dtypes = {"bf16": bf16, "data_types": {"grad_accum_dtype": "bf16"}}
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": MAX_NORM}
    return _deepspeed(model, device, own, count, tensor_parallel | dtypes | batch)


def _deepspeed(
    model: Path, device: str, own: Any, count: int, config: dict[str, Any], *, coalesces: bool = False
) -> Step:
    """Return the step of a DeepSpeed engine, which divides and reduces gradients once `count` micro-batches are in."""
    import deepspeed

    loaded = _load(model, device, own)
    made = _adam(loaded, device)
    more = {"gradient_accumulation_steps": count, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=loaded, optimizer=made, config=config | more)[0]

    def step(batches: list[Any]) -> float:
        losses = []
        with engine.coalesce_grad_reduction() if coalesces else nullcontext():
            for index, batch in enumerate(batches):
                loss = engine(input_ids=batch, labels=batch).loss
                engine.set_gradient_accumulation_boundary(index + 1 == count)
                engine.backward(loss)
                losses.append(loss.detach())
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        return statistics.fmean(float(loss) for loss in losses)

    return step


def _fsdp2(model: Path, device: str, own: Any, count: int) -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    loaded = _load(model, device, own)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in loaded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(loaded, mesh=mesh)
    adam = _adam(loaded, device)

    def step(batches: list[Any]) -> float:
        losses = []
        for index, batch in enumerate(batches):
            loaded.set_requires_gradient_sync(index + 1 == count)
            loss = loaded(input_ids=batch, labels=batch).loss
            (loss / count).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(loaded.parameters(), MAX_NORM)
        adam.step()
        adam.zero_grad()
        return statistics.fmean(float(loss) for loss in losses)

    return step


if __name__ == "__main__":
    main()
