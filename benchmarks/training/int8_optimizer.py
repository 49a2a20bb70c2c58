"""Reward curves with AdamW's states in float32, bfloat16 and int8, side by side.

    python -m benchmarks.training.int8_optimizer --output out.jsonl
    python -m benchmarks.training.int8_optimizer --optimizer int8 --seed 1 --steps 20 --output out.jsonl
    python -m benchmarks.training.int8_optimizer --device cpu --size tiny --tokens 32 --steps 2 --seed 1
    python -m benchmarks.training.int8_optimizer --summary out.jsonl

The job is that of `benchmarks.training.correction`: SmolLM2-135M-Instruct, all weights in bfloat16, colocated, is paid
for the share of digits in what it writes. A job for each type and seed, all at once on one GPU, each under ZeRO-2, so
that the optimizer updates one flat tensor. Jobs of one seed begin with the same samples. A line has the metrics of each
step; a job that is late has fewer steps.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import SHAPES
from benchmarks.training import correction
from benchmarks.training.curves import at_once, train

MODULE = "benchmarks.training.int8_optimizer"
OPTIMIZERS = ("float32", "bfloat16", "int8")
NAMES = {"reward": "reward", "grad_norm": "grad_norm", "step_time": "step_time", "kl": "trained/sampling/kl"}
ENDS = 10  # steps of a curve's beginning and end


@click.command()
@click.option("--optimizer", "optimizers", type=click.Choice(OPTIMIZERS), multiple=True, default=OPTIMIZERS)
@click.option("--seed", "seeds", type=int, multiple=True, default=(1, 2, 3), show_default=True)
@click.option("--tokens", default=128, show_default=True, help="Of a completion.")
@click.option("--prompts", default=4, show_default=True, help=f"Of a step; each has {correction.GENERATIONS} of them.")
@click.option("--steps", default=100, show_default=True)
@click.option("--seconds", default=480, show_default=True, help="Longest time of the jobs; then fewer steps count.")
@click.option("--size", type=click.Choice(list(SHAPES)), help="A random model in place of SmolLM2.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("int8_optimizer.jsonl"), show_default=True)
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print results as a table and exit.")
def main(
    optimizers: tuple[str, ...], seeds: tuple[int, ...], output: Path, summary: Path | None, **options: Any
) -> None:
    """Run a job for each type and seed at once, and append a line for each."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
        return
    runs = [(optimizer, seed) for seed in seeds for optimizer in optimizers]
    if len(runs) == 1:
        sys.exit(run(*runs[0], output.resolve(), **options))
    if options["size"] is None:
        correction.smollm2()  # once, before all jobs want it
    failed = at_once(MODULE, "optimizer", runs, output.resolve(), options)
    print(as_table([json.loads(line) for line in output.read_text().splitlines()]))
    sys.exit(failed)


def run(optimizer: str, seed: int, output: Path, **options: Any) -> bool:
    """Train once and append a line. Return whether the job failed."""
    line = {"optimizer": optimizer, "seed": seed, "generations": correction.GENERATIONS, **options}
    line |= {"learning_rate": correction.RATE}
    chosen = {"optimizer": optimizer, "seed": seed}
    job = partial(spec, optimizer=optimizer, seed=seed, **options)
    return "error" in train(MODULE, line, chosen, job, NAMES, output, options)


def spec(folder: Path, optimizer: str, seed: int, **options: Any) -> dict[str, Any]:
    """Spec of a job; its model and its prompts are put into `folder`."""
    job = correction.spec(folder, "token_truncate", seed, **options)
    job["parallelism"] = {"zeroStage": 2, "gradientCheckpointing": True, "optimizerDtype": optimizer}
    job["generation"]["kvCacheMemory"] = "1Gi" if options["device"] == "cuda" else "256Mi"
    return job


def as_table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: a row for each type of states, over its seeds."""
    table = [
        f"| states | steps | reward, first {ENDS} | last {ENDS}, by seed | mean | spread | gradient norm |",
        "|" + " --- |" * 7,
    ]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["seed"]):
        groups[line["optimizer"]].append(line)
    for optimizer in (dtype for dtype in OPTIMIZERS if dtype in groups):
        failed = [line for line in groups[optimizer] if "error" in line]
        table += [f"| {optimizer} | failed: {line['error'].splitlines()[0]} |" + " |" * 5 for line in failed]
        if not (done := [line for line in groups[optimizer] if "error" not in line]):
            continue
        first = statistics.mean(value for line in done for value in line["reward"][:ENDS])
        last = [statistics.mean(line["reward"][-ENDS:]) for line in done]
        norms = [value for line in done for value in line["grad_norm"] if value is not None]
        cells = [optimizer, ", ".join(str(len(line["reward"])) for line in done), f"{first:.3f}"]
        cells += [", ".join(f"{value:.3f}" for value in last), f"{statistics.mean(last):.3f}"]
        cells += [f"{max(last) - min(last):.3f}", f"{statistics.mean(norms):.2f}" if norms else ""]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


if __name__ == "__main__":
    main()
