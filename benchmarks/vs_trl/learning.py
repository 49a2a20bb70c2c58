"""All runs of `reward_parity` on three public tasks, both sides and three seeds, side by side on one GPU.

    python -m benchmarks.vs_trl.learning --output learning.jsonl
    python -m benchmarks.vs_trl.learning --device cpu --size tiny --steps 2 --task gcd --seed 1 --output tiny.jsonl
    python -m benchmarks.vs_trl.reward_parity plot learning.jsonl --image learning.png

Nothing is timed. A run that OUTPUT has a line of is not made again, so a second call goes on. Logs are beside OUTPUT.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.vs_trl.reward_parity import SIDES, make_or_find_model
from benchmarks.vs_trl.tasks import TASKS

GRACE = 30  # seconds for a late run to end the processes that it has started


@click.command()
@click.option("--task", "tasks", type=click.Choice(list(TASKS)), multiple=True, default=list(TASKS), show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(1, 2, 3), show_default=True)
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, show_default=True)
@click.option("--steps", default=40, show_default=True)
@click.option("--at-once", default=9, show_default=True, help="Number of runs side by side.")
@click.option("--seconds", default=250, show_default=True, help="Longest time of a run.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(["tiny"]), help="A tiny random model in place of SmolLM2.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    tasks: tuple[str, ...],
    seeds: tuple[int, ...],
    sides: tuple[str, ...],
    at_once: int,
    seconds: int,
    output: Path,
    **options: Any,
) -> None:
    """Make the runs that OUTPUT has no line of yet."""
    output = output.resolve()
    lines = output.read_text().splitlines() if output.exists() else []
    known = {(line["task"], line["seed"], line["side"]) for line in map(json.loads, lines)}
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options["size"] is None:
        make_or_find_model(Path(), None)  # once, before all runs want it
    shared = [f"--{name}={value}" for name, value in options.items() if value is not None]
    command = [sys.executable, "-m", "benchmarks.vs_trl.reward_parity", "run", *shared, f"--output={output}"]

    def make(task: str, seed: int, side: str) -> bool:
        log = output.with_name(f"{task}-{side}-{seed}.log")
        with log.open("w") as file:
            run = subprocess.Popen(
                [*command, f"--task={task}", f"--seed={seed}", f"--side={side}"], stdout=file, stderr=file
            )
            try:
                code = run.wait(seconds)
            except subprocess.TimeoutExpired:
                run.terminate()  # it ends the processes that it has started
                code = run.wait(GRACE)
        last = (log.read_text().strip().splitlines() or [""])[-1]
        print(last if code == 0 else f"FAILED ({code}) {task} {side} {seed}: {last}", flush=True)
        return code == 0

    runs = [one for one in itertools.product(tasks, seeds, sides) if one not in known]
    with ThreadPoolExecutor(at_once) as pool:
        sys.exit(not all(list(pool.map(lambda one: make(*one), runs))))


if __name__ == "__main__":
    main()
