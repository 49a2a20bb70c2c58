"""Train for 30 steps, kill the environments of episodes every few steps, and compare with a run that is left alone.

    python -m benchmarks.training.kills --output kills_cpu.jsonl

Four jobs of a random model on one CPU, by `grpo run`: environments on two pods and beside the rank, left alone and
killed. On pods, SIGKILL ends all processes of one pod; beside the rank, those of all episodes, or of the environment
with them, in turn. `retries` says how many episodes played there, step by step. vLLM has one request at a time and no
prefix cache: what it computes for a request may depend on those beside it, and they come in another order. Appends a
line for each job: digests of the final weights, and what each step said.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.common.runs import JobError, about, append, measured, run_job
from benchmarks.training.kills_game import CALLS, STOPS

MODULE = "benchmarks.training.kills"
ZYGOTE, POD = "grpo_workload.environments.zygote", "grpo_workload.environment_pod"
KEPT = ("reward", "loss", "grad_norm", "episodes/turns/mean", "tools/call_frequency", "completions/mean_length")
"""Metrics of a step that are compared: they must be the same in all runs, to the last digit."""
PLACES = ("pods", "beside")


@click.command(help=__doc__)
@click.option("--steps", default=30, show_default=True)
@click.option("--every", default=3, show_default=True, help="Steps from one kill to the next.")
@click.option("--where", type=click.Choice(PLACES), multiple=True, default=PLACES, show_default=True)
@click.option("--timeout", default=600, show_default=True, help="Longest time for a job, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(steps: int, every: int, where: tuple[str, ...], timeout: int, output: Path) -> None:
    lines = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(Path(scratch) / "model")
        for place in where:
            for killed in (False, True):
                killer = Killer(place, every if killed else steps, steps)

                def measure(folder: Path, place: str = place, killer: Killer = killer) -> dict[str, Any]:
                    return train(folder, model, place, steps, timeout, killer)

                line: dict[str, Any] = {"environments": place, "is_killed": killed}
                line |= measured(f"{place} {killed}", scratch, measure)
                line |= about(MODULE, steps=steps, every=every)
                append(output, line)
                lines.append(line)
                click.echo(
                    json.dumps({name: line.get(name) for name in ("steps", "kills", "retries", "seconds", "error")})
                )
    if any("error" in line for line in lines):
        sys.exit(1)
    same = all((line["weights"], line["steps"]) == (lines[0]["weights"], lines[0]["steps"]) for line in lines)
    click.echo(f"all runs have the same weights and metrics: {same}")
    sys.exit(not same)


def train(folder: Path, model: Path, place: str, steps: int, timeout: float, watch: Killer) -> dict[str, Any]:
    """Run a job; return its final weights' digests, and what its steps said. Raises JobError if it fails."""
    prompts = [{"prompt": [{"role": "user", "content": f"Problem {number}."}]} for number in range(200)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    settings = spec(model, folder / "prompts.jsonl", place, steps)
    rows = run_job(folder, settings, steps, seconds=timeout, watch=watch, to_end=True)
    (weights,) = folder.glob(f"run/*/data/*/*/*/**/*{steps}/**/model.safetensors")
    if sum(row["episodes/lost"] for row in rows) or (watch.wanted and not sum(row["episodes/retries"] for row in rows)):
        raise JobError("an episode is lost, or none was killed", "")
    return {
        "weights": digests(weights),
        "steps": [{name: row[name] for name in KEPT} for row in rows],
        "kills": watch.kills,
        "retries": [row["episodes/retries"] for row in rows],
        "lost": sum(row["episodes/lost"] for row in rows),
        "seconds": [round(row["step_time"], 2) for row in rows],
        "settings": settings,
    }


def digests(file: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as weights:
        names = weights.keys()  # it is no dictionary
        return {name: hashlib.sha256(weights.get_tensor(name).tobytes()).hexdigest() for name in names}


class Killer:
    """Kills environments while episodes play, every few steps."""

    def __init__(self, place: str, every: int, steps: int) -> None:
        self._place, self._draw, self._looks = place, random.Random(1), 0
        self.wanted = list(range(every - 1, steps, every)) if every < steps else []  # steps in which to kill
        self.kills: list[dict[str, Any]] = []

    def __call__(self, finished: int) -> None:
        """Take a look, five times a second; `finished` is the number of finished steps."""
        if len(self.kills) == len(self.wanted) or finished < self.wanted[len(self.kills)]:
            return
        if self._looks > 0:  # not always the beginning of a step
            self._looks -= 1
            return
        number = len(self.kills)
        commands = {one: command(one) for one in psutil.Process().children(recursive=True)}
        zygotes = {one for one, words in commands.items() if ZYGOTE in words}
        playing = {one for one in zygotes if ZYGOTE in command(one.parent())}
        if self._place == "pods":
            pods = [one for one, words in commands.items() if POD in words and ZYGOTE not in words]
            victims = set()
            if pods:
                pod = min(pods, key=lambda one: one.create_time())  # the one that was not killed the last time
                victims = {pod, *pod.children(recursive=True)}
        else:
            victims = playing if number % 2 else zygotes
        if not victims & playing:
            return
        for one in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        print(f"step {finished + 1}: killed {len(victims)} processes, {len(victims & playing)} of episodes", flush=True)
        # Their processes: some have played their episode, and wait for another.
        self.kills.append({"in_step": finished + 1, "episodes": len(victims & playing)})
        self._looks = self._draw.randrange(6)


def command(process: psutil.Process | None) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()) if process else ""
    return ""


def make_model(folder: Path, template: Mapping[str, Any] = CALLS) -> Path:
    """Write a random model with a response template for calls: of `kills_game.Game`, as that file says."""
    from transformers import AutoTokenizer

    from support.trainer.tiny_model import make_tiny_model

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder))
    tokenizer.response_template = template
    tokenizer.save_pretrained(folder)
    return folder


def spec(model: Path, prompts: Path, place: str, steps: int) -> dict[str, Any]:
    """Return the spec of a job."""
    from support.trainer.tool_template import TOOL_TEMPLATE

    game = {"name": "game", "factory": "benchmarks.training.kills_game:Game", "memoryLimit": "2Gi"}
    groups = [{"name": "games", "replicas": 2, "sessions": 16}]
    return {
        "device": {"type": "cpu"},
        "model": {"path": str(model), "dtype": "float32", "chatTemplate": TOOL_TEMPLATE},
        "dataset": {"path": str(prompts)},
        "environments": [game],
        "rewards": [{"name": "game", "environment": {}}],
        "training": {
            "maxSteps": steps,
            "promptsPerStep": 4,
            "numGenerations": 4,
            "learningRate": 1e-3,
            "maxCompletionLength": 160,
            "maxToolCallingIterations": 4,
            "stop": [*STOPS],
        },
        "generation": {
            "maxModelLen": 512,
            "kvCacheMemory": "64Mi",
            "toolCallParser": "hf",
            "engineArgs": {"enforce_eager": True, "max_num_seqs": 1, "enable_prefix_caching": False},
        },
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
    } | ({"environmentPods": {"groups": groups}} if place == "pods" else {})


if __name__ == "__main__":
    main()
