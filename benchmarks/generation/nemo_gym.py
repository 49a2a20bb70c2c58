"""Trains on episodes of NeMo-Gym: its agent and its tools, in a Python of their own, ask the gateway.

    python -m benchmarks.generation.nemo_gym --python nemo/bin/python --output nemo_gym_cpu.jsonl

The rows are those of its example_single_tool_call, as they are. The model is random; any turn with a large letter is
read as a call of their tool. Appends a JSON line to OUTPUT: metrics of each step, and the conversation with the most
turns.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common.runs import about, append, measured, run_job
from benchmarks.training.kills import make_model
from benchmarks.training.kills_game import CALLS, STOPS

MODULE = "benchmarks.generation.nemo_gym"
KEPT = (
    *("reward", "rewards/gym/mean", "grad_norm", "trained/sampling/sampling_logp_difference/max"),
    *("tools/call_frequency", "episodes/turns/mean", "episodes/sequences/mean", "episodes/lost", "episodes/retries"),
)
ROWS = "import {0} as one, pathlib; print(pathlib.Path(one.__path__[0], 'data/example.jsonl').read_text())"
VERSION = "import importlib.metadata as one, sys; print(one.version('nemo-gym'), sys.version.split()[0])"


@click.command(help=__doc__)
@click.option("--python", required=True, help="An interpreter that has nemo-gym.")
@click.option("--steps", default=4, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(python: str, steps: int, output: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        line = measured("nemo_gym", scratch, lambda folder: train(folder, python, steps))
    gym, interpreter = said(python, VERSION).split()
    line |= {"nemo_gym": gym, "python": interpreter} | about(MODULE, python="PYTHON", steps=steps)
    append(output, line)
    click.echo(json.dumps(line)[:2000])
    sys.exit("error" in line)


def said(python: str, code: str) -> str:
    """Return what the other interpreter prints."""
    return subprocess.run([python, "-Ec", code], capture_output=True, text=True, check=True).stdout


def train(folder: Path, python: str, steps: int) -> dict[str, Any]:
    """Run a job; return what its steps said, and a conversation. Raises JobError if it fails."""
    rows = said(python, ROWS.format("resources_servers.example_single_tool_call")).splitlines()
    prompts = [{"prompt": [{"role": "user", "content": "Unused."}], "gym": row} for row in rows if row.strip()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    settings = spec(make_weather_model(folder / "model"), folder / "rows.jsonl", steps)
    variables = {"NEMO_GYM_PYTHON": python, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = run_job(folder, settings, steps, seconds=900, variables=variables, to_end=True)
    journals = folder.glob("run/*/data/*/*/*/journal/*/*/*.gz")
    groups = [json.loads(line) for file in journals for line in gzip.decompress(file.read_bytes()).splitlines()]
    episodes = [one["episode"] for group in groups for one in group["completions"]]
    longest = max(episodes, key=lambda one: one["turns"])
    return {
        "steps": [{name: row[name] for name in KEPT} for row in found],
        "episodes": len(episodes),
        "turns": sum(one["turns"] for one in episodes),
        "calls": sum(one["calls"] for one in episodes),
        "longest": [*longest["asked"], *longest["messages"]],
    }


def make_weather_model(folder: Path) -> Path:
    """Write a random model that calls `get_weather`, and reads 2,048 tokens."""
    text = json.dumps(CALLS).replace('"look"', '"get_weather"').replace('"text": "{content}"', '"city": "{content}"')
    make_model(folder, json.loads(text))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def spec(model: Path, rows: Path, steps: int) -> dict[str, Any]:
    """Return the spec of a job."""
    from support.trainer.tool_template import TOOL_TEMPLATE

    program = {"name": "gym", "program": "benchmarks.generation.nemo_gym_servers:play", "timeoutSeconds": 200}
    return {
        "device": {"type": "cpu"},
        "model": {"path": str(model), "dtype": "float32", "chatTemplate": TOOL_TEMPLATE},
        "dataset": {"path": str(rows)},
        "environments": [program | {"env": ["NEMO_GYM_PYTHON"]}],
        "rewards": [
            {"name": "gym", "environment": {}},
            {"name": "varies", "function": "benchmarks.common.metered:reward"},  # the other one is 1 for all
        ],
        "training": {
            "maxSteps": steps,
            "promptsPerStep": 2,
            "numGenerations": 4,
            "learningRate": 1e-3,
            "maxCompletionLength": 500,
            "stop": [*STOPS],
        },
        "generation": {
            "maxModelLen": 2048,
            "kvCacheMemory": "64Mi",
            "toolCallParser": "hf",
            "engineArgs": {"enforce_eager": True},
        },
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
    }


if __name__ == "__main__":
    main()
