"""A large model on all GPUs of a host under ZeRO-3: steps, pushes, a save, and its peaks of memory beside the plan's.

    python -m benchmarks.training.large_model --size 14 --gpus 4 --output large_model.jsonl
    python -m benchmarks.training.large_model --size 32 --lora --gpus 4 --output large_model.jsonl
    python -m benchmarks.training.large_model --size tiny --gpus 2 --device cpu --output /tmp/smoke.jsonl

One job by `grpo run`: Colocate, one engine over all GPUs (tensor parallel), gradient checkpointing, states in bfloat16
that leave while the engine generates. Weights are random. A line has the seconds of each step by phase, the seconds of
pushes and of the save, each rank's peaks, and the plan for one such rank. `--save` writes a whole checkpoint after the
second step, so it needs room on the disk.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.common.busy import gpu_names
from benchmarks.common.models import SHAPES, VOCABULARY, config_of
from benchmarks.common.runs import REWARDS, about, append, measured, run_job

GIB = 2**30
SHARD_BYTES = 4 * GIB
COMPLETION_TOKENS, MICRO_BATCH_TOKENS = 256, 4096
PHASES = ("time/", "step_time", "tokens_per_second", "grad_norm", "trained/sampling/kl")
MEMORY = ("memory_used_peak", "memory_allocated_peak", "memory_reserved_peak")


@click.command()
@click.option("--size", type=click.Choice(list(SHAPES)), default="14", show_default=True)
@click.option("--gpus", default=4, show_default=True)
@click.option("--lora", is_flag=True, help="Train adapters of rank 16 in place of all weights.")
@click.option("--save", is_flag=True, help="Write a checkpoint after the second step.")
@click.option("--steps", default=4, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--timeout", default=420, show_default=True, help="Longest time of the job, in seconds.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the random model; made if missing.")
@click.option("--only-model", is_flag=True, help="Make the model and exit.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("large_model.jsonl"), show_default=True)
def main(model: Path | None, output: Path, timeout: int, only_model: bool, **options: Any) -> None:
    """Run the job and append a line."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = (model or Path(scratch) / "model").resolve()
        if not model.exists():
            write_model(model, options["size"])
        if only_model:
            return
        job = spec(model, **options)

        def measure(folder: Path) -> dict[str, Any]:
            planned = plan_of(folder, job)
            rows = run_job(folder, job, options["steps"], seconds=timeout, least=1)
            steps = [{name: value for name, value in row.items() if name.startswith(PHASES)} for row in rows]
            return {"steps": steps, "peaks_gib": _peaks(folder), "planned": planned}

        line = options | {"spec": job} | measured(options["size"], scratch, measure)
    given = {name: value for name, value in options.items() if value is not False}
    line |= about("benchmarks.training.large_model", **given)
    line |= {"gpus_used": gpu_names() if options["device"] == "cuda" else []}
    append(output, line)
    print(json.dumps({name: line.get(name) for name in ("error", "steps", "peaks_gib")}), flush=True)
    sys.exit("error" in line)


def spec(model: Path, size: str, gpus: int, lora: bool, save: bool, steps: int, device: str) -> dict[str, Any]:
    """Return the spec of the job."""
    on_cpu = {"enforce_eager": True, "max_num_batched_tokens": 4096, "block_size": 128}
    is_tiny = size == "tiny"
    states = {"offloadOptimizer": "generating"} if not lora else {}
    fields: dict[str, Any] = {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": 8,
            "numGenerations": 4,
            "maxSteps": steps + 1,
            "maxCompletionLength": 16 if is_tiny else COMPLETION_TOKENS,
            "maxTokensPerMicroBatch": MICRO_BATCH_TOKENS,
        },
        "parallelism": {"zeroStage": 3, "gradientCheckpointing": True, "optimizerDtype": "bfloat16"} | states,
        "generation": {
            "topology": "Colocate",
            "tensorParallel": gpus,
            "maxModelLen": 1024,
            "kvCacheMemory": "2Gi" if device == "cuda" else "64Mi",
            "engineArgs": on_cpu if device == "cpu" else {"enforce_eager": True},
        },
        "trainer": {"groups": [{"name": "t", "gpus": gpus}]},
        "storage": {"checkpointEverySteps": 2 if save else 10_000},
        "rendezvous": {"timeoutSeconds": 600},
    }
    return fields | ({"lora": {"r": 16, "alpha": 32}} if lora else {})


def plan_of(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return what `grpo plan` says: GiB by phase and part of one rank, and whether it fits."""
    import torch

    from grpo_cli.local.edited import contract_of
    from grpo_operator.api.spec import parse_spec
    from grpo_operator.layout.job import Job
    from grpo_spec.gpus import gpu_bytes
    from grpo_workload.capacity.plan import plan
    from grpo_workload.capacity.shapes import Models

    on_gpu = job | {"device": {"type": "cuda"}}
    named = Job(name="bench", namespace="n", uid="u", generation=1, spec=parse_spec(on_gpu))
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else gpu_bytes("h100")
    made = plan(contract_of(named), total, Models())
    places = [made.gpus[0], *(one for one in made.places if one.is_host)]
    return {
        "fits": made.fits,
        "gib": {
            one.name: {
                phase: {part: round(size / GIB, 2) for part, size in parts.items() if size}
                for phase, parts in one.phases.items()
            }
            for one in places
        },
    }


def _peaks(folder: Path) -> list[dict[str, float]]:
    """Return the largest of each peak over the steps, by rank, in GiB."""
    largest: dict[int, dict[str, float]] = {}
    for file in folder.glob("run/*/data/*/*/*/ranks.jsonl"):
        for line in file.read_text().splitlines():
            for rank in json.loads(line)["ranks"]:
                peaks = largest.setdefault(rank["rank"], {})
                for name in MEMORY:
                    if name in rank:
                        peaks[name] = max(peaks.get(name, 0.0), round(rank[name] / GIB, 2))
    return [{"rank": rank, **peaks} for rank, peaks in sorted(largest.items())]


def write_model(folder: Path, size: str) -> None:
    """Write a random model in bfloat16 file by file: it takes the memory of a few files, and no GPU.

    All weights are pieces of one random block: their bytes do not matter here.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from support.trainer.tiny_model import make_tiny_tokenizer

    vocabulary = VOCABULARY if size != "tiny" else 512
    tokenizer = make_tiny_tokenizer(vocabulary - len(make_tiny_tokenizer()))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = config_of("qwen2", size, max_position_embeddings=2048, bos_token_id=None, **ends)
    config.architectures, config.dtype = ["Qwen2ForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    block = torch.randn(2**26, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)

    def weight(name: str) -> torch.Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        count, start = shape.numel(), 61 * len(name) % 1000
        return block[start:].repeat(-(-count // (block.numel() - start)))[:count].reshape(shape).contiguous()

    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, shape in shapes.items():
        if shards[-1] and room < 2 * shape.numel():
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= 2 * shape.numel()
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> None:
        save_file({name: weight(name) for name in names}, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, files, shards))
    index = {
        "metadata": {"total_size": sum(2 * shape.numel() for shape in shapes.values())},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
