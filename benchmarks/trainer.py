"""A training step of ours beside one of TRL's, on one GPU: same model, prompts, lengths of completions, loss, vLLM.

    python benchmarks/trainer.py --rows trl-equal,ours-equal --output results.jsonl
    python benchmarks/trainer.py --summary results.jsonl

A row is SIDE-LENGTHS[-OPTION...]. Sides: trl, ours. Lengths: equal, lognormal. Options:
  fp32        float32 masters (TRL: a float32 model under bfloat16 autocast), where weights and AdamW are bfloat16 otherwise
  autocast    TRL's default for a bfloat16 model, which costs it casts
  corrected   importance sampling of whole sequences (TRL's default); bypass (ours): the engine's log-probabilities are the anchor
  nockpt      without gradient checkpointing
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
import yaml
from metered import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS, Meter, lengths, prompts
from models import make_model
from transformers import Qwen2Config

MICRO_BATCH, WARMUP, LIMIT = 8, 1, 240
PACKED_TOKENS = 8192


@click.command()
@click.option("--rows", help="Rows to run, with commas.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("trainer.jsonl"), help="Where a line a row is appended.")
@click.option("--steps", default=3, help="Measured steps of a row.")
@click.option("--size", default="1.5")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--profile", is_flag=True, help="Write a profile of the last step of each row beside the output.")
@click.option("--set", "changes", multiple=True, help="Settings of our job, as training.maxTokensPerMicroBatch=16384.")
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print a file of rows as a table, and end.")
@click.option("--row", hidden=True)
@click.option("--model", hidden=True, type=click.Path(path_type=Path))
def main(
    rows: str,
    output: Path,
    steps: int,
    size: str,
    device: str,
    profile: bool,
    changes: tuple[str, ...],
    summary: Path | None,
    row: str | None,
    model: Path | None,
) -> None:
    """Run rows one after the other, each in a process of its own."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))  # noqa: T201
    elif row is not None:
        assert model is not None
        run_row(row, model, output.resolve(), steps, size, device, profile, changes)
    else:
        sys.exit(drive(rows.split(","), output, size, device))


def drive(rows: list[str], output: Path, size: str, device: str) -> int:
    """Number of rows that failed."""
    failed = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = Path(scratch) / "model"
        make_model(model, size, device, config_class=Qwen2Config, max_length=4096)
        for row in rows:
            command = [sys.executable, *sys.argv, "--row", row, "--model", str(model)]
            log = Path(scratch) / f"{row}.log"
            with log.open("w") as file:
                try:
                    code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT, check=False).returncode
                except subprocess.TimeoutExpired:
                    code = -1
            if code:
                failed += 1
            print(f"FAILED {row} ({code})\n{log.read_text()[-4000:]}" if code else output.read_text().splitlines()[-1][:400], flush=True)  # noqa: T201
    return failed


def run_row(row: str, model: Path, output: Path, steps: int, size: str, device: str, profile: bool, changes: tuple[str, ...]) -> None:
    """Measure one row in this process, which ends with it."""
    side, kind, *options = row.split("-")

    def finish(results: dict[str, Any]) -> None:
        settings = {"size": size, "micro_batch": MICRO_BATCH, "warmup": WARMUP, "set": changes}
        with output.open("a") as file:
            file.write(json.dumps({"row": row, **results, "settings": settings, "command": " ".join(sys.argv)}) + "\n")

    wanted = lengths(kind, 1.0 if size != "tiny" else 1 / 32)
    meter = Meter(wanted, warmup=WARMUP, steps=steps, finish=finish, profile=f"{output}.{row}.profile.txt" if profile else None)
    longest = 2048 if size != "tiny" else 64
    (run_trl if side == "trl" else run_ours)(model, meter, set(options), longest, device, changes)
    sys.exit("training ended before the measured steps did")


def run_trl(model: Path, meter: Meter, options: set[str], longest: int, device: str, _: tuple[str, ...]) -> None:
    """TRL's GRPOTrainer."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    from datasets import Dataset
    from metered import reward
    from trl import GRPOConfig, GRPOTrainer

    patch_engine(device)
    meter.install()
    is_half = "fp32" not in options
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=model.parent),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=NUM_PROMPTS * NUM_GENERATIONS // MICRO_BATCH,
        num_generations=NUM_GENERATIONS,
        max_completion_length=longest,
        max_steps=100,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="dapo",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=device == "cuda",
        vllm_max_model_length=PROMPT_TOKENS + longest,
        vllm_importance_sampling_correction="corrected" in options,
        gradient_checkpointing="nockpt" not in options,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=device == "cuda" and (not is_half or "autocast" in options),
        use_cpu=device == "cpu",
        model_init_kwargs={"dtype": "bfloat16" if is_half else "float32", "attn_implementation": "sdpa"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts()])
    GRPOTrainer(model=str(model), reward_funcs=[reward], args=config, train_dataset=dataset).train()


def run_ours(model: Path, meter: Meter, options: set[str], longest: int, device: str, changes: tuple[str, ...]) -> None:
    """Our rank, with a contract made as `grpo run` makes it."""
    folder = Path(tempfile.mkdtemp(dir=model.parent))
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()))
    is_half = "fp32" not in options
    correction = "sequence_mask" if "corrected" in options else "bypass" if "bypass" in options else "none"
    spec: dict[str, Any] = {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"path": str(folder / "data.jsonl")},
        "rewards": [{"name": "reward", "function": "metered:reward"}],
        "training": {
            "promptsPerStep": NUM_PROMPTS,
            "numGenerations": NUM_GENERATIONS,
            "perDeviceTrainBatchSize": MICRO_BATCH,
            "maxTokensPerMicroBatch": PACKED_TOKENS,
            "maxCompletionLength": longest,
            "maxSteps": 100,
            "importanceSamplingCorrection": correction,
        },
        "parallelism": {
            "zeroStage": 0 if is_half else 2,
            "optimizerDtype": "bfloat16" if is_half else "float32",
            "gradientCheckpointing": "nockpt" not in options,
        },
        "generation": {"maxModelLen": PROMPT_TOKENS + longest, "engineArgs": engine_arguments(device)},
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
    }
    if device == "cpu":
        spec["generation"]["kvCacheMemory"] = "256Mi"
    for change in changes:
        path, value = change.split("=", 1)
        section, field = path.split(".")
        spec[section][field] = yaml.safe_load(value)
    from grpo_operator.api import parse_spec
    from grpo_operator.topology import Job, make_contract, plan_topology

    job = Job(namespace="bench", name="ours", uid="u", generation=1, spec=parse_spec(spec))
    contract = make_contract(job, plan_topology(job), 0)
    (folder / "contract.json").write_text(contract.model_dump_json(by_alias=True))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    os.environ.update(GRPO_CONTRACT=str(folder / "contract.json"), GRPO_DATA_DIR=str(folder), GRPO_STATE_DIR=str(folder), POD_UID="u")
    from grpo_workload import environment

    environment.prepare(contract.device, os.environ)
    meter.install()
    from grpo_workload.train import main as train

    sys.exit(f"the rank ended by itself: {train()!r}")


def engine_arguments(device: str) -> dict[str, Any]:
    """Of vLLM on both sides: no compilation, so that a row starts in seconds; generation is not what is compared."""
    return {"enforce_eager": True, "max_num_batched_tokens": 4096} | ({} if device == "cuda" else {"block_size": 128})


def patch_engine(device: str) -> None:
    """Give TRL's engine the arguments that TRL has no setting for."""
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import LLM

    if device == "cpu":
        VLLMGeneration.sync_weights = lambda self: None  # fails on vLLM's CPU backend, which packs weights
    build = LLM.__init__

    def built(llm: Any, *args: Any, **arguments: Any) -> None:
        if device == "cpu":
            arguments |= {"kv_cache_memory_bytes": 2**28, "enable_sleep_mode": False}
        build(llm, *args, **{**arguments, **engine_arguments(device)})

    LLM.__init__ = built


def as_table(rows: list[dict[str, Any]]) -> str:
    """Medians of each row, and their ratios to TRL's row of the same lengths and options."""
    lines = ["| row | step s | generation s | rest s | rest / TRL's | memory GiB | memory / TRL's |", "|---|---|---|---|---|---|---|"]
    best = {row["row"]: row for row in rows}
    for row in rows:
        peer = best.get(row["row"].replace("ours", "trl").replace("-bypass", ""))
        median, memory = row["median"], row["memory_gib"]
        ratios = [""] * 2
        if peer is not None and peer is not row:
            ratios = [f"{median['rest'] / peer['median']['rest']:.2f}", f"{memory / peer['memory_gib']:.2f}"]
        seconds = [f"{median[name]:.2f}" for name in ("step", "generation", "rest")]
        lines.append("| " + " | ".join([row["row"], *seconds, ratios[0], str(memory), ratios[1]]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
