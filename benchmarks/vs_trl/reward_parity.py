"""Reward curves of our trainer and TRL's on the quickstart's task: SmolLM2-135M-Instruct adds and subtracts digits.

    python -m benchmarks.vs_trl.reward_parity run --side trl --topology Server --seed 1 --gpus 2,3 --output parity.jsonl
    python -m benchmarks.vs_trl.reward_parity plot parity.jsonl --image parity.png

Both sides see the same prompts in the same order. The seed changes the order, because TRL ignores its seed when vLLM
is colocated. Both keep float32 masters and compute in bfloat16, with TRL's defaults: dapo, sequence_mask, beta 0. A
line has every step of a run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from benchmarks.common.runs import JobError, append, run_job, start_trl_server, versions

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS, GENERATIONS, NEW_TOKENS, CONTEXT, RATE, STOPPED = 6, 8, 16, 256, 2e-5, 0.15
CACHE = 2**30  # bytes of vLLM's KV cache
LAST = 10  # number of steps whose mean is the final value
DATASET: dict[str, Any] = {
    "reasoningGym": {
        "dataset": "basic_arithmetic",
        "params": {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ["+", "-"],
            "allow_parentheses": False,
        },
        "size": 10000,
    },
    "systemPrompt": "Math.",
    "promptTemplate": "{prompt} Give only the answer.",
}


@click.group()
def main() -> None:
    """Run one of the curves, or plot them all."""


@main.command()
@click.option("--side", type=click.Choice(["ours", "trl"]), required=True)
@click.option("--topology", type=click.Choice(["Colocate", "Server"]), required=True)
@click.option("--seed", type=int, required=True)
@click.option("--staleness", default=0, show_default=True, help="training.maxStaleness; ours alone.")
@click.option("--quantization", help="generation.engineArgs.quantization, fp8 for example; ours alone.")
@click.option("--steps", default=60, show_default=True)
@click.option(
    "--gpus", default="0", show_default=True, help="Device numbers: the trainer's and, with Server, the engine's."
)
@click.option("--output", type=click.Path(path_type=Path), default=Path("parity.jsonl"), show_default=True)
def run(
    side: str,
    topology: str,
    seed: int,
    staleness: int,
    quantization: str | None,
    steps: int,
    gpus: str,
    output: Path,
) -> None:
    """Train once and append a line."""
    if (staleness or quantization) and side == "trl":
        raise click.UsageError("--staleness and --quantization are options of ours")
    from grpo_demo.pretrained import MODELS, install

    output = output.resolve()
    hub = Path(os.environ.setdefault("HF_HUB_CACHE", str(Path(tempfile.gettempdir()) / "parity-hub")))
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": gpus}
    install(MODELS["smollm2"], hub)
    with tempfile.TemporaryDirectory() as scratch:
        if side == "ours":
            curve = _ours(Path(scratch), topology, seed, staleness, quantization, steps)
        else:
            curve = _trl(Path(scratch), topology, seed, steps, gpus)
    line: dict[str, Any] = {"side": side, "topology": topology, "seed": seed, "staleness": staleness, **curve}
    line |= {"quantization": quantization}
    line |= {"final_accuracy": round(statistics.mean(curve["accuracy"][-LAST:]), 4), "learning_rate": RATE}
    line["versions"] = versions("torch", "transformers", "deepspeed", "trl", "vllm")
    line["command"] = " ".join(["python -m benchmarks.vs_trl.reward_parity", *sys.argv[1:-2]])
    append(output, line)
    print(side, topology, seed, staleness, line["final_accuracy"], flush=True)


@main.command()
@click.argument("lines", type=click.Path(exists=True, path_type=Path))
@click.option("--image", type=click.Path(path_type=Path), required=True)
def plot(lines: Path, image: Path) -> None:
    """Draw all curves, smoothed over five steps, and print final accuracies."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    mpl.use("Agg")
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, lines.read_text().splitlines()):
        ahead = f" maxStaleness {row['staleness']}" if row.get("staleness") else ""
        rounded = f" {row['quantization']}" if row.get("quantization") else ""
        groups[f"{row['side']} {row['topology']}{ahead}{rounded}"].append(row)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(
        xlabel="step", ylabel="accuracy", title="SmolLM2-135M-Instruct, one-digit sums: mean and range over seeds"
    )
    for name, rows in sorted(groups.items()):
        curves = np.array([np.convolve(row["accuracy"], np.ones(5) / 5, mode="valid") for row in rows])
        steps = np.arange(5, 5 + curves.shape[1])
        (drawn,) = axes.plot(steps, curves.mean(axis=0), label=name)
        axes.fill_between(steps, curves.min(axis=0), curves.max(axis=0), alpha=0.15, color=drawn.get_color())
        final = [row["final_accuracy"] for row in rows]
        print(f"{name:28} {statistics.mean(final):.3f} +- {statistics.stdev(final):.3f}  {sorted(final)}")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image)


def _ours(
    folder: Path, topology: str, seed: int, staleness: int, quantization: str | None, steps: int
) -> dict[str, list[Any]]:
    generation: dict[str, Any] = {
        "topology": topology,
        "maxModelLen": CONTEXT,
        "kvCacheMemory": str(CACHE),
        "engineArgs": {"enforce_eager": True} | ({"quantization": quantization} if quantization else {}),
    }
    if topology == "Colocate":
        generation["colocate"] = {
            "sleepLevel": 0
        }  # vLLM checks how much memory a sleep frees; other processes on the device would disturb that
    else:
        generation["server"] = {"groups": [{"name": "engine", "gpus": 1}]}
    spec = {
        "device": {"type": "cuda"},
        "model": {"name": MODEL},
        "dataset": DATASET,
        "rewards": [{"name": "accuracy", "accuracy": {}}, {"name": "stopped", "weight": STOPPED, "stopped": {}}],
        "training": {
            "maxSteps": steps,
            "maxStaleness": staleness,
            "promptsPerStep": PROMPTS,
            "numGenerations": GENERATIONS,
            "learningRate": RATE,
            "lrSchedulerType": "constant",
            "maxCompletionLength": NEW_TOKENS,
            "importanceSamplingCorrection": "token_truncate" if staleness or quantization else "sequence_mask",
            "seed": seed,
        },
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 10_000},
    }
    try:
        rows = run_job(folder, spec, steps)
    except JobError as error:
        sys.exit(str(error))
    curves = {"accuracy": "rewards/accuracy/mean", "reward": "reward"}
    if staleness:
        curves |= {"versions_behind": "staleness/mean"}
    if staleness or quantization:
        curves |= {"kl": "trained/sampling/kl", "ess": "trained/sampling/ess"}
    # A step whose groups all have equal rewards trains on nothing, and has no `trained/`.
    return {curve: [row.get(metric) for row in rows] for curve, metric in curves.items()}


def _trl(folder: Path, topology: str, seed: int, steps: int, gpus: str) -> dict[str, list[float]]:
    own, _, other = gpus.partition(",")
    server = None
    port = 18000 + 10 * seed
    if topology == "Server":
        server = start_trl_server(
            MODEL, port=port, context=CONTEXT, cache_bytes=CACHE, device=other, log=folder / "server.log", share=0.05
        )
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": own,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port + 3 + (topology == "Server")),
    }
    try:
        if server is not None:
            _wait_for(port, server, folder / "server.log")
        return _train_trl(folder, topology, seed, steps, port)
    finally:
        if server is not None:
            os.killpg(server.pid, 15)


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    sys.exit(f"TRL's server did not come up:\n{log.read_text()[-3000:]}")


def _train_trl(folder: Path, topology: str, seed: int, steps: int, port: int) -> dict[str, list[float]]:
    import vllm
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from grpo_spec.inputs import DatasetConfig
    from grpo_spec.rewards import RewardConfig
    from grpo_workload.data.dataset import load_prompts
    from grpo_workload.rewards.math_answers import Verifier
    from grpo_workload.rewards.references import read

    build = vllm.LLM.__init__
    vllm.LLM.__init__ = lambda llm, *args, **options: build(
        llm, *args, **options | {"kv_cache_memory_bytes": CACHE, "enforce_eager": True}
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    source = load_prompts(DatasetConfig.model_validate(DATASET), tokenizer, seed=seed)
    prompts = [prompt for step in range(steps) for prompt in source.batch(step, PROMPTS)]
    assert all(
        tuple(tokenizer.apply_chat_template(prompt.text, add_generation_prompt=True, return_dict=False))
        == prompt.token_ids
        for prompt in prompts
    )
    verify = Verifier(RewardConfig.model_validate({"name": "accuracy", "accuracy": {}}))

    def accuracy(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float | None]:
        return [verify(read(gold), messages[-1]["content"]) for gold, messages in zip(answer, completions, strict=True)]

    def stopped(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[-1] == tokenizer.eos_token_id) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        gradient_accumulation_steps=1,
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        reward_weights=[1.0, STOPPED],
        bf16=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=seed,
        use_vllm=True,
        vllm_gpu_memory_utilization=0.05,
        vllm_mode="server" if topology == "Server" else "colocate",
        vllm_server_base_url=f"http://127.0.0.1:{port}",
        vllm_group_port=port + 1,
        vllm_max_model_length=CONTEXT,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([{"prompt": prompt.text, "answer": prompt.columns["answer"]} for prompt in prompts])
    trainer = GRPOTrainer(model=MODEL, reward_funcs=[accuracy, stopped], args=config, train_dataset=dataset)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return {"accuracy": [row["rewards/accuracy/mean"] for row in rows], "reward": [row["reward"] for row in rows]}


if __name__ == "__main__":
    main()
