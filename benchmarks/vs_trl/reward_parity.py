"""Reward curves of our trainer and TRL's, and held-out problems solved: SmolLM2-135M-Instruct on reasoning-gym.

    python -m benchmarks.vs_trl.reward_parity run --side trl --topology Server --seed 1 --gpus 2,3 --output parity.jsonl
    python -m benchmarks.vs_trl.reward_parity run --side ours --seed 1 --device cpu --size tiny --steps 2
    python -m benchmarks.vs_trl.reward_parity plot parity.jsonl --image parity.png

Both sides see the same prompts in the same order. The seed changes the order, because TRL ignores its seed when vLLM
is colocated. Both keep float32 masters and compute in bfloat16, with TRL's defaults: dapo, sequence_mask, beta 0. A
line has every step of a run, and the share of problems solved before and after it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from benchmarks.common.busy import gpu_names, gpu_number
from benchmarks.common.runs import JobError, append, run_job, versions
from benchmarks.vs_trl.reward_parity_trl import CACHE, CONTEXT, run_trl
from benchmarks.vs_trl.tasks import (
    ACCURACY,
    GENERATIONS,
    HELD_OUT_SEED,
    NEW_TOKENS,
    PROMPTS,
    RATE,
    STOPPED,
    TASKS,
    Task,
    commonest,
    held_out,
    solved,
)

MODULE = "benchmarks.vs_trl.reward_parity"
LAST = 10  # number of steps whose mean is the final value
SIDES = ("ours", "trl")


@click.group()
def main() -> None:
    """Run one of the curves, or plot them all."""


@main.command()
@click.option("--side", type=click.Choice(SIDES), required=True)
@click.option("--task", "name", type=click.Choice(list(TASKS)), default="sums", show_default=True)
@click.option("--topology", type=click.Choice(["Colocate", "Server"]), default="Colocate", show_default=True)
@click.option("--seed", type=int, required=True)
@click.option("--staleness", default=0, show_default=True, help="training.maxStaleness; ours alone.")
@click.option("--quantization", help="generation.engineArgs.quantization, fp8 for example; ours alone.")
@click.option("--steps", default=60, show_default=True)
@click.option(
    "--gpus", help="Device numbers: the trainer's and, with Server, the engine's. Default: the first that is visible."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(["tiny"]), help="A tiny random model in place of SmolLM2.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("parity.jsonl"), show_default=True)
def run(side: str, name: str, gpus: str | None, size: str | None, output: Path, **options: Any) -> None:
    """Train once and append a line."""
    if (options["staleness"] or options["quantization"]) and side == "trl":
        raise click.UsageError("--staleness and --quantization are options of ours")
    from transformers import AutoTokenizer

    output, gpus = output.resolve(), gpus or gpu_number(0)
    # TRL trains in this process: on one device. Its server is told its own.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus if side == "ours" else gpus.partition(",")[0]
    task, device, seed, steps = TASKS[name], options["device"], options["seed"], options["steps"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_or_find_model(folder, size)
        tokenizer = AutoTokenizer.from_pretrained(model)
        source = task.load(tokenizer, seed)
        prompts = [prompt for step in range(steps) for prompt in source.batch(step, PROMPTS)]
        problems = held_out(task.load(tokenizer, HELD_OUT_SEED), prompts)
        before = solved(problems, model, device)
        if side == "ours":
            curves, trained = _ours(folder, task, model, **options)
        else:
            place = {"topology": options["topology"], "gpus": gpus, "device": device}
            curves, trained = run_trl(folder, model, prompts, seed=seed, **place)
        after = solved(problems, trained, device)
    line: dict[str, Any] = {"side": side, "task": name, "topology": options["topology"], "seed": seed, **curves}
    line |= {name: options[name] for name in ("staleness", "quantization")}
    line |= {"final_accuracy": round(statistics.mean(curves["accuracy"][-LAST:]), 4), "learning_rate": RATE}
    line |= {
        "held_out": {"problems": len(problems), "commonest": commonest(problems), "before": before, "after": after}
    }
    line["versions"] = versions("torch", "transformers", "deepspeed", "trl", "vllm")
    line |= {"gpus": gpu_names() if device == "cuda" else []}
    line["command"] = " ".join([f"python -m {MODULE}", *(one for one in sys.argv[1:] if "output" not in one)])
    append(output, line)
    print(side, name, seed, line["final_accuracy"], line["held_out"], flush=True)


@main.command()
@click.argument("lines", type=click.Path(exists=True, path_type=Path))
@click.option("--image", type=click.Path(path_type=Path), required=True)
def plot(lines: Path, image: Path) -> None:
    """Draw all curves, smoothed over five steps, and print final accuracies, and held-out problems solved."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    mpl.use("Agg")
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in map(json.loads, lines.read_text().splitlines()):
        ahead = f" maxStaleness {row['staleness']}" if row.get("staleness") else ""
        rounded = f" {row['quantization']}" if row.get("quantization") else ""
        tasks[row.get("task", "sums")][f"{row['side']} {row['topology']}{ahead}{rounded}"].append(row)
    figure = Figure(figsize=(8 if len(tasks) == 1 else 4 * len(tasks), 4.5), dpi=150, layout="constrained")
    figure.suptitle("SmolLM2-135M-Instruct: mean and range over seeds")
    for at, (task, groups) in enumerate(tasks.items(), 1):
        axes = figure.add_subplot(1, len(tasks), at, xlabel="step", ylabel="accuracy", title=task)
        for name, rows in sorted(groups.items()):
            curves = np.array([np.convolve(row["accuracy"], np.ones(5) / 5, mode="valid") for row in rows])
            steps = np.arange(5, 5 + curves.shape[1])
            (drawn,) = axes.plot(steps, curves.mean(axis=0), label=name)
            axes.fill_between(steps, curves.min(axis=0), curves.max(axis=0), alpha=0.15, color=drawn.get_color())
            final = [row["final_accuracy"] for row in rows]
            spread = statistics.stdev(final) if len(final) > 1 else 0.0
            print(f"{task:10} {name:28} {statistics.mean(final):.3f} +- {spread:.3f}  {sorted(final)}")
            for asked in (row["held_out"] for row in rows if "held_out" in row):
                print(f"{'':39} {asked}")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(image)


def make_or_find_model(folder: Path, size: str | None) -> str:
    """Return the folder of the model that is trained."""
    if size is not None:
        from support.trainer.tiny_model import make_tiny_model

        return str(make_tiny_model(folder / "model"))
    from grpo_demo.pretrained import MODELS, install

    hub = os.environ.get("HF_HUB_CACHE", Path(tempfile.gettempdir()) / "parity-hub")
    return str(install(MODELS["smollm2"], Path(hub)))


def _ours(
    folder: Path,
    task: Task,
    model: str,
    *,
    topology: str,
    seed: int,
    staleness: int,
    quantization: str | None,
    steps: int,
    device: str,
) -> tuple[dict[str, list[Any]], Path]:
    on_cpu = {"max_num_batched_tokens": 8192, "block_size": 128} if device == "cpu" else {}
    generation: dict[str, Any] = {
        "topology": topology,
        "maxModelLen": CONTEXT,
        "kvCacheMemory": str(CACHE // (1 if device == "cuda" else 8)),
        "engineArgs": {"enforce_eager": True} | on_cpu | ({"quantization": quantization} if quantization else {}),
    }
    if topology == "Colocate":
        # vLLM checks how much memory a sleep frees; other processes on the device would disturb that.
        generation["colocate"] = {"sleepLevel": 0}
    else:
        generation["server"] = {"groups": [{"name": "engine", "gpus": 1}]}
    spec = {
        "device": {"type": device},
        "model": {"path": model},
        "dataset": task.source,
        "rewards": [ACCURACY, {"name": "stopped", "weight": STOPPED, "stopped": {}}],
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
        rows = run_job(folder, spec, steps, to_end=True)
    except JobError as error:
        sys.exit(str(error))
    curves = {"accuracy": "rewards/accuracy/mean", "reward": "reward"}
    if staleness:
        curves |= {"versions_behind": "staleness/mean"}
    if staleness or quantization:
        curves |= {"kl": "trained/sampling/kl", "ess": "trained/sampling/ess"}
    (trained,) = folder.glob(f"run/*/data/*/*/*/checkpoints/step-{steps}/model")
    # A step whose groups all have equal rewards trains on nothing, and has no `trained/`.
    return {curve: [row.get(metric) for row in rows] for curve, metric in curves.items()}, trained


if __name__ == "__main__":
    main()
