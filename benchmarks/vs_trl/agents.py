"""Steps of agents with a tool, of our trainer and of TRL's GRPOTrainer: the same calls and answers on both sides.

    python -m benchmarks.vs_trl.agents --side ours --latency 0 --output agents.jsonl
    python -m benchmarks.vs_trl.agents --side trl --latency 1 --timeout 500 --output agents.jsonl
    python -m benchmarks.vs_trl.agents --side ours-server --steps 10 --output agents.jsonl
    python -m benchmarks.vs_trl.agents --summary agents.jsonl

A step trains on 64 episodes, 8 of each of 8 prompts, of a random model with a colocated engine. Each episode has one
or two calls of an SQLite tool, and an answer. What each turn says, and how long each call takes, is recorded
(`benchmarks.common.scripted`): engines sample as many tokens as each turn has, and the recorded ones take their place.
`--latency` is the median of a call's seconds, which are log-normal with a sigma of 0.5.

A step lasts from its first request to the engine to that of the next. `rollout` ends when its last turn is complete.
The first step is not measured, and its calls take no time. GPU and cores are read 5 times a second in measured steps.
The side `trl-async` has an async tool. TRL 1.16 runs the calls of one turn of one episode side by side, if they are
async, and those of different episodes one after the other.

The sides `ours-server` and `trl-server` have two GPUs: one trains, the other has vLLM's server, and `--staleness` says
how many steps are sampled ahead. The latter is TRL's AsyncGRPOTrainer, as `async_trainer.py` runs it: its calls run in
threads, one for each episode in flight. Calls take their time in all steps. Own tokens per second are those of the
measured steps by their seconds; their number is rounded up to whole cycles of sampling ahead. TRL's steps differ in
tokens, because it trains on the episodes that end first.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.common.busy import Busy
from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, write_prompts
from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import REWARDS, JobError, about, append, measured, run_job, versions
from benchmarks.common.scripted import Script, question, times
from benchmarks.generation.staleness import host
from benchmarks.vs_trl import agents_async, agents_trl
from benchmarks.vs_trl.agents_table import as_table
from benchmarks.vs_trl.trainer_rows import engine_arguments

MODULE = "benchmarks.vs_trl.agents"
WARMUP = 1
LONGEST, CONTEXT = 2048, 4096  # tokens of a completion, with the tool's, and of a prompt with it
SAMPLES = NUM_PROMPTS * NUM_GENERATIONS
KEPT = (
    "time/",
    "staleness/",
    "sample/",
    "rollout/",
    "perf/",
    "engines/",
    "step_time",
    "completions/",
    "tools/",
    "episodes/",
    "loss",
    "grad_norm",
    "reward",
)


@click.command()
@click.option("--side", type=click.Choice(["ours", "trl", "trl-async", *agents_async.SIDES]))
@click.option("--latency", default=0.0, show_default=True, help="Median seconds of a call.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Measured steps.")
@click.option("--staleness", default=4, show_default=True, help="Steps to sample ahead, of sides with two GPUs.")
@click.option("--size", type=click.Choice(list(SHAPES)), default="1.5", show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--timeout", default=240, show_default=True, help="Longest time for the side, in seconds.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the random model; made if missing.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("agents.jsonl"), show_default=True)
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print results as a table and exit.")
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--port", type=int, hidden=True)
def main(
    side: str | None,
    latency: float,
    steps: int,
    staleness: int,
    size: str,
    device: str,
    timeout: int,
    model: Path | None,
    output: Path,
    summary: Path | None,
    folder: Path | None,
    port: int | None,
) -> None:
    """Run one side and append a line."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
        return
    if side is None:
        raise click.UsageError("one of --side and --summary is needed")
    if folder is not None:
        assert model is not None
        if port is not None:
            agents_async.train(model, folder, port, device, staleness, LONGEST)
            sys.exit("training ended before the measured steps did")
        arguments = agents_trl.settings(model, folder, device, longest=LONGEST, context=CONTEXT)
        agents_trl.train(model, folder, device, WARMUP, arguments, is_async=side == "trl-async")
        sys.exit("training ended before the measured steps did")
    script = Script(latency=latency)
    line: dict[str, Any] = {"side": side, "latency": latency, "size": size, "device": device}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        made = make_model(model or Path(scratch) / "model", size, device, kind="qwen2", max_length=CONTEXT).resolve()
        begun = time.monotonic()

        def measure_side(folder: Path) -> dict[str, Any]:
            if side in agents_async.SIDES:
                shape = {"longest": LONGEST, "context": CONTEXT}
                rows, settings, result = agents_async.measure(
                    side, MODULE, script, folder, made, steps, device, timeout, staleness, **shape
                )
                for one in rows if side == "ours-server" else []:  # TRL's logs are of other episodes than its steps
                    check(one, script)
                return result | recorded(script, rows, settings)
            return measure(side, script, folder, made, steps, device, timeout)

        line |= measured(f"{side} {latency}", scratch, measure_side)
    line |= {"seconds": round(time.monotonic() - begun, 1), "host": host(device)}
    ahead = {"staleness": staleness} if side in agents_async.SIDES else {}
    line |= about(MODULE, side=side, latency=latency, steps=steps, **ahead, size=size, device=device, timeout=timeout)
    if side.startswith("trl"):
        line["versions"] |= versions("trl")
    append(output, line)
    print(as_table([line]), flush=True)
    sys.exit("error" in line)


def measure(
    side: str, script: Script, folder: Path, model: Path, steps: int, device: str, timeout: int
) -> dict[str, Any]:
    """Run a side and return what was measured. Raises JobError when it does not take its steps, or takes others."""
    from transformers import AutoTokenizer

    plugin, busy = folder / "plugin", Busy(device, 1)
    variables = script.variables(plugin, AutoTokenizer.from_pretrained(model))

    def look() -> int:
        begun, _ = times(plugin)
        busy.look(WARMUP < len(begun) <= WARMUP + steps)
        return len(begun)

    def watch(_: int) -> None:
        look()

    def row(step: int, position: int) -> list[dict[str, str]]:
        return question(step, position, WARMUP)

    if side == "ours":
        write_prompts(folder / "prompts.jsonl", WARMUP + steps + 2, row)
        settings = spec(model, folder / "prompts.jsonl", device)
        wanted = WARMUP + steps + 1  # the last step ends when the next begins
        rows = run_job(folder, settings, wanted, seconds=timeout, variables=variables, watch=watch)
    else:
        settings = agents_trl.settings(model, folder, device, longest=LONGEST, context=CONTEXT)
        command = ["-m", MODULE, "--side", side, "--device", device, "--model", str(model), "--folder", str(folder)]
        rows = agents_trl.run(command, folder, variables, WARMUP + steps + 1, seconds=timeout, watch=look)
    rows = rows[: WARMUP + steps]
    for one in rows:
        check(one, script)
    begun, ended = times(plugin)
    seconds = [end - begin for begin, end in pairwise(begun)][: WARMUP + steps]
    rollouts = [end - begin for begin, end in zip(begun, ended, strict=False)][: WARMUP + steps]
    median = statistics.median(seconds[WARMUP:])
    means = busy.means()
    return {
        "tokens_per_second": round(script.num_tokens / median, 1),
        "median": {"step": round(median, 3), "rollout": round(statistics.median(rollouts[WARMUP:]), 3)},
        "tokens": script.num_tokens,
        "step_seconds": [round(one, 3) for one in seconds],
        "rollout_seconds": [round(one, 3) for one in rollouts],
        "warmup": WARMUP,
        "busy": means,
        "gpu_idle": [round(1 - share, 3) for share in means["gpus"]],
    } | recorded(script, rows, settings)


def recorded(script: Script, rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Return what lines of all sides have: the script, the logs of steps, and what was set."""
    return {
        "calls": script.num_calls,
        "call_seconds": script.call_seconds,
        "logs": [{name: value for name, value in one.items() if name.startswith(KEPT)} for one in rows],
        "settings": settings,
        "script": {"turns": script.lengths, "milliseconds": script.milliseconds},
    }


def check(step: dict[str, Any], script: Script) -> None:
    """Check that a step was that of the script, by its metrics, which have the same names on both sides.

    Raises:
        JobError: it was another.
    """
    seen = {
        "own tokens": round(step["completions/mean_length"] * SAMPLES),
        "calls": round(step["tools/call_frequency"] * SAMPLES),
        "failed calls": step["tools/failure_frequency"],
        "truncated episodes": step["completions/clipped_ratio"],
        "retries": step.get("episodes/retries", 0),  # ours alone has them
    }
    wanted = dict.fromkeys(seen, 0) | {"own tokens": script.num_tokens, "calls": script.num_calls}
    if seen != wanted:
        raise JobError(f"a step has {seen}, not {wanted}", "")


def spec(model: Path, prompts: Path, device: str) -> dict[str, Any]:
    """Return the spec of our job."""
    from support.trainer.tool_template import TOOL_TEMPLATE

    generation: dict[str, Any] = {
        "gpuMemoryUtilization": 0.3,
        "maxModelLen": CONTEXT,
        "engineArgs": engine_arguments(device),
        "colocate": {"sleepLevel": 0},
    }
    if device == "cpu":
        generation["kvCacheMemory"] = "256Mi"
    return {
        "device": {"type": device},
        "model": {"path": str(model), "chatTemplate": TOOL_TEMPLATE},
        "dataset": {"path": str(prompts)},
        "tools": [{"function": "benchmarks.vs_trl.agents_tool:query"}],
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": NUM_PROMPTS,
            "numGenerations": NUM_GENERATIONS,
            "maxCompletionLength": LONGEST,
            "maxSteps": 100,
            "importanceSamplingCorrection": "none",
        },
        "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True},
        "generation": generation,
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
    }


if __name__ == "__main__":
    main()
