"""A small model learns to use a calculator while environment pods and its engine are killed.

    python -m benchmarks.training.calculator_kills --output calculator_kills_cpu.jsonl

examples/calculator by `grpo run`, on CPUs, once for each seed: SmolLM2-135M, with the tool on two environment pods and
the engine on a pod of its own, which begins again (`onGenerationFailure: RestartGeneration`). While the engine samples,
SIGKILL ends all processes of an environment pod every few steps, and all of the engine's in steps between them. Appends
a line for each seed: rewards by step, the share of held-out problems that the model solves before and after, kills, and
how many episodes began again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil
import yaml

from benchmarks import ROOT
from benchmarks.common.runs import JobError, about, append, commit, measured, run_job
from benchmarks.training.kills import Killer, command
from grpo_spec.contract import Contract

MODULE = "benchmarks.training.calculator_kills"
EXAMPLE = ROOT / "examples" / "calculator"
ENGINE_POD = "grpo_workload.engine_pod"
_RUNNING = re.compile(r"^vllm:num_requests_running\{.*\} [1-9]", re.MULTILINE)
KEPT = ("reward", "tools/call_frequency", "episodes/retries", "episodes/lost", "step_time")


@click.command(help=__doc__)
@click.option("--seed", "seeds", multiple=True, default=(1, 2, 3), show_default=True, type=int)
@click.option("--steps", default=16, show_default=True)
@click.option("--prompts", default=4, show_default=True, help="Prompts of a step, of 8 episodes each.")
@click.option("--problems", default=48, show_default=True, help="Held-out problems.")
@click.option("--every", default=4, show_default=True, help="Steps from one kill of an environment pod to the next.")
@click.option("--timeout", default=3600, show_default=True, help="Longest time for a job, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    seeds: tuple[int, ...], steps: int, prompts: int, problems: int, every: int, timeout: int, output: Path
) -> None:
    from grpo_demo.pretrained import MODELS, install

    failed = False
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = install(MODELS["smollm2"], Path(scratch) / "hub")
        for seed in seeds:
            settings = spec(model, seed, steps, prompts, problems)

            def measure(folder: Path, settings: dict[str, Any] = settings) -> dict[str, Any]:
                return train(folder, settings, every, timeout)

            line = {"seed": seed, "commit": commit(), "cpus": os.cpu_count()}
            line |= measured(f"seed {seed}", scratch, measure)
            line |= about(MODULE, seed=seed, steps=steps, prompts=prompts, problems=problems, every=every)
            append(output, line)
            failed = failed or "error" in line
            shown = ("seed", "solved_before", "solved_after", "kills", "engine_kills", "retries", "lost", "error")
            click.echo(json.dumps({name: line[name] for name in shown if name in line}))
    sys.exit(failed)


def train(folder: Path, settings: dict[str, Any], every: int, timeout: float) -> dict[str, Any]:
    """Run a job; return its curve, and what was killed. Raises JobError if it fails, or nothing was killed."""
    steps = settings["training"]["maxSteps"]
    pods = Killer("pods", every, steps)
    engine = EngineKiller(range(every + every // 2, steps, 2 * every))

    def watch(finished: int) -> None:
        if is_sampling(folder):
            pods(finished)
            engine(finished)

    path = os.pathsep.join(filter(None, [str(EXAMPLE), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(os.cpu_count())}
    rows = run_job(folder, settings, steps, seconds=timeout, variables=variables, watch=watch, to_end=True)
    if not pods.kills or not engine.kills:
        raise JobError(f"killed {len(pods.kills)} environment pods, and the engine {len(engine.kills)} times", "")
    (file,) = folder.glob("run/*/data/*/*/*/evaluations.jsonl")
    before, *_, after = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        "solved_before": before["eval/rewards/right/mean"],
        "solved_after": after["eval/rewards/right/mean"],
        "kills": pods.kills,
        "engine_kills": engine.kills,
        "retries": sum(row["episodes/retries"] for row in rows),
        "lost": sum(row["episodes/lost"] for row in rows),
        "steps": [{name: row[name] for name in KEPT} for row in rows],
        "evaluations": [before, after],
        "settings": settings,
    }


class EngineKiller:
    """Kills the engine's pod in some steps."""

    def __init__(self, wanted: Sequence[int]) -> None:
        """`wanted`: numbers of finished steps at which to kill it, each once."""
        self._wanted = wanted
        self.kills: list[dict[str, Any]] = []

    def __call__(self, finished: int) -> None:
        """Take a look; `finished` is the number of finished steps."""
        if len(self.kills) == len(self._wanted) or finished < self._wanted[len(self.kills)]:
            return
        pods = [one for one in psutil.Process().children(recursive=True) if ENGINE_POD in command(one)]
        victims = [*pods, *(child for pod in pods for child in pod.children(recursive=True))]
        for one in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        print(f"step {finished + 1}: killed {len(victims)} processes of the engine", flush=True)
        self.kills.append({"in_step": finished + 1, "processes": len(victims)})


def is_sampling(folder: Path) -> bool:
    """Whether the engine of the run in `folder` has requests: then episodes are played."""
    for path in folder.glob("run/*/contract.json"):  # none before the run has begun
        (engine,) = Contract.model_validate_json(path.read_text()).engines
        url = f"http://{engine.host}:{engine.port}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            return _RUNNING.search(answer.read().decode()) is not None
    return False


def spec(model: Path, seed: int, steps: int, prompts: int, problems: int) -> dict[str, Any]:
    """Return the spec of a job: the example's, with another place for its tool and its engine."""
    *_, manifest = yaml.safe_load_all((EXAMPLE / "job.yaml").read_text())
    made: dict[str, Any] = manifest["spec"]
    del made["podTemplate"]  # which mounts the functions
    made["evaluation"]["dataset"]["reasoningGym"]["size"] = problems
    return made | {
        "device": {"type": "cpu"},
        "model": {name: value for name, value in made["model"].items() if name != "name"} | {"path": str(model)},
        "training": made["training"] | {"seed": seed, "maxSteps": steps, "promptsPerStep": prompts},
        "evaluation": made["evaluation"] | {"everySteps": steps},
        "generation": made["generation"] | {"topology": "Server", "server": {"groups": [{"name": "e", "gpus": 1}]}},
        "environmentPods": {"groups": [{"name": "calculators", "replicas": 2, "sessions": 16}]},
        "failurePolicy": {"onGenerationFailure": "RestartGeneration"},
        "storage": {"checkpointEverySteps": 1000},
    }


if __name__ == "__main__":
    main()
