"""Seconds a step waits for its prompts when a user's function is slow for each row, by number of worker processes.

A real job by `grpo run` with a tiny random model on the CPU. The function sleeps for ROW_SECONDS, like one that reads
a file or asks a server: a machine with few cores has none to spare for computing. The first three steps are left out,
because the workers start with the first. Prints one JSON line for each number of workers.

    python -m benchmarks.training.preprocessing --row-seconds 0.1 --workers 0 --workers 1 --workers 2 --workers 4
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common.runs import run_job, versions

PROMPTS, GENERATIONS, WARM = 8, 4, 3
MODULE = """
import time

def prepare(row):
    time.sleep({seconds})
    return {{"prompt": row["question"]}}
"""


def job(folder: Path, workers: int, steps: int) -> dict[str, Any]:
    """Spec of the job: one rank, and completions long enough for a step of a second or two."""
    return {
        "device": {"type": "cpu"},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "dataset": {
            "path": str(folder / "rows.jsonl"),
            "preprocess": "slow_rows:prepare",
            "dataloaderNumWorkers": workers,
        },
        "rewards": [{"name": "stopped", "stopped": {}}],
        "training": {
            "promptsPerStep": PROMPTS,
            "numGenerations": GENERATIONS,
            "maxSteps": steps,
            "maxCompletionLength": 128,
        },
        "generation": {"engine": "Transformers", "maxModelLen": 256},
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
    }


@click.command()
@click.option("--row-seconds", default=0.1)
@click.option("--workers", type=int, multiple=True, default=(0, 1, 2, 4))
@click.option("--steps", default=15)
def main(row_seconds: float, workers: tuple[int, ...], steps: int) -> None:
    """Run the jobs one after the other and print how long their steps waited."""
    from support.trainer.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        folder = Path(scratch)
        make_tiny_model(folder / "model")
        (folder / "slow_rows.py").write_text(MODULE.format(seconds=row_seconds))
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps({"question": f"What is {n} + 1?"}) + "\n" for n in range(1000))
        )
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        for count in workers:
            (own := folder / f"workers-{count}").mkdir()
            metrics = run_job(own, job(folder, count, steps), steps)[WARM:]
            waits = [step["time/prompts"] for step in metrics]
            result = {
                "workers": count,
                "row_seconds": row_seconds,
                "prompts_per_step": PROMPTS,
                "wait_median": statistics.median(waits),
                "step_median": statistics.median(step["step_time"] for step in metrics),
                "waits": waits,
                "step_times": [step["step_time"] for step in metrics],
                "cores": os.cpu_count(),
                "versions": versions("torch", "transformers", "datasets"),
                "command": " ".join(["python -m benchmarks.training.preprocessing", *sys.argv[1:]]),
            }
            click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
