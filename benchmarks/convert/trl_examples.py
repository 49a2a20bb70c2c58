"""Take TRL's examples with tools and environments over, and play an episode of each in the processes of a rank.

The scripts are read at a commit of a checkout of TRL, which may be bare. `openenv.sh` starts OpenEnv's servers, and
installs its clients:

    benchmarks/convert/openenv.sh FOLDER OpenEnv miniwob-plusplus &
    python -m benchmarks.convert.trl_examples trl FOLDER/clients benchmarks/results/convert_trl_examples.json

Counted are the scripts below `examples/scripts` that give GRPOTrainer `tools` or `environment_factory`. Played means:
the job is valid; its module starts as in a rank, and describes its tools; for each of its rows, `reset` and the calls
of `PLAYS` work, against the servers; the job's own reward functions score what came out.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from grpo_cli.convert.conversion import convert
from grpo_cli.convert.read import read
from grpo_cli.convert.settle import Given
from grpo_operator.api.spec import parse_spec
from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.environments.base import EnvironmentLostError, Program, ToolCall
from grpo_workload.environments.processes import Processes
from grpo_workload.environments.sessions import RankSessions
from grpo_workload.environments.state import rebuild

COMMIT = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
CALL_SECONDS = 240  # of a browser on two cores that others use
TRAINS = re.compile(r"^from trl import .*\bGRPOTrainer\b", re.MULTILINE)
ACTS = re.compile(r"\b(tools|environment_factory)=")
ECHO, WORDLE, SUDOKU, CATCH, CARLA, BROWSER = (f"http://localhost:{port}" for port in range(9001, 9007))


Calls = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Play:
    """A script's input from its user, the model's calls, and the reason why it does not play."""

    given: dict[str, str] = field(default_factory=dict)
    calls: Calls = ()
    lacks: str = ""


_LOOK: Calls = (("observe", {}), ("lane_change", {"direction": "left"}))
_CLICK: Calls = (("noop", {}), ("click", {"bid": "13"}))
_IMAGES = "results with images, which a job refuses"
PLAYS = {
    "grpo_2048": Play(calls=(("move", {"direction": "left"}), ("move", {"direction": "up"}))),
    "grpo_agent": Play(  # as the comment at its top calls it
        {
            "model_name_or_path": "Qwen/Qwen3-1.7B",
            "use_vllm": "True",
            "max_completion_length": "1024",
            "max_steps": "400",
        },
        (
            ("query_biogrid", {"sql_command": "SELECT * FROM interactions"}),
            ("query_biogrid", {"sql_command": "DROP TABLE x"}),
        ),
    ),
    "openenv/echo": Play({"env_host": ECHO}, (("echo", {"message": "Hello World!"}),)),
    "openenv/wordle": Play({"env_url": WORDLE}, (("guess", {"guess": "[crane]"}), ("guess", {"guess": "[xxxxx]"}))),
    "openenv/sudoku": Play({"env_host": SUDOKU}, (("place", {"row": 1, "col": 1, "number": 5}),)),
    "openenv/catch": Play({"env_mode": "space", "env_host": CATCH}, (("move", {"direction": "left"}), ("stay", {}))),
    "openenv/multi_env": Play(
        {"wordle_url": WORDLE, "catch_url": CATCH}, (("guess", {"guess": "[crane]"}), ("move", {"direction": "left"}))
    ),
    "openenv/carla": Play({"env_urls": f"{CARLA} {CARLA}"}, _LOOK),
    "openenv/carla_vlm": Play({"env_urls": f"{CARLA} {CARLA}"}, _LOOK, _IMAGES),
    "openenv/carla_vlm_gemma": Play({"env_urls": f"{CARLA} {CARLA}"}, _LOOK, _IMAGES),
    "openenv/browsergym": Play({"space_url": BROWSER}, _CLICK, _IMAGES),
    "openenv/browsergym_llm": Play({"space_url": BROWSER}, _CLICK),
    "openreward/seta": Play(lacks="a service, openreward.ai, which also has its rows; trl and openreward in the image"),
    "harbor/data_agent": Play(lacks="sandboxes in Docker, and their rows; trl and harbor in the image"),
}


def play(job: dict[str, Any], files: dict[str, str], calls: Calls) -> dict[str, Any]:
    """Play an episode for each row in the processes of a rank, in the present folder; return what came out."""
    for name, text in files.items():
        Path(name).write_text(text)
    for one in job["spec"].get("environments", ()):
        one["timeoutSeconds"] = CALL_SECONDS
    spec = parse_spec(job["spec"])
    config = spec.trainer_config()
    sessions = RankSessions(Processes(config.tools, config.environments, os.environ), config, wants_reward=False)
    sessions.wants_state = True
    try:
        sessions.ready()
        rows = [json.loads(line) for line in files.get("rows.jsonl", '{"prompt": [], "answer": "no"}').splitlines()]
        tools = [schema["function"]["name"] for schema in sessions.schemas.of(rows[0])]
        return {"tools": tools, "episodes": [asyncio.run(_episode(sessions, spec, row, calls)) for row in rows]}
    finally:
        sessions.close()


async def _episode(sessions: RankSessions, spec: TrainerConfig, row: dict[str, Any], calls: Calls) -> dict[str, Any]:
    session = sessions.open(row, seed=1)
    assert not isinstance(session, Program)
    try:
        told = await session.reset()
        turns: list[dict[str, Any]] = []
        results = []
        for name, arguments in calls:
            (result,) = await session.call([ToolCall(name=name, arguments=arguments)], CALL_SECONDS)
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "name": name, "content": result.content})
            results.append({"call": name, "is_failed": result.is_failed, "result": result.content[:300]})
        _, state = await session.end()
    finally:
        await session.close()
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    columns["completions"] = [[*turns, {"role": "assistant", "content": "*no*"}]]
    if state:
        columns["environments"] = [rebuild(state)]
    return {"reset": told[:300], "calls": results, "rewards": {one.name: _score(one, columns) for one in spec.rewards}}


def _score(reward: Any, columns: dict[str, list[Any]]) -> Any:
    module, _, name = reward.function.partition(":")
    (score,) = getattr(importlib.import_module(module), name)(**columns)
    return score


def examine(name: str, text: str, prompt: str) -> dict[str, Any]:
    """Convert one script and play it; return what came out, and what was lost."""
    asked = PLAYS.get(name, Play(lacks="not tried"))
    given = asked.given | ({"system_prompt": prompt} if name.endswith("sudoku") else {})
    try:
        conversion = convert(read(f"{Path(name).name}.py", text, variables=given), Given(nodes=1, gpus=2, rows=1000))
    except ValueError as error:
        return {"lacks": str(error)}
    *others, job = yaml.safe_load_all(conversion.manifest)
    found: dict[str, Any] = {
        "is a valid job": True,
        "given": asked.given,
        "not taken over": {finding.name: finding.note for finding in conversion.left},
        "lacks": asked.lacks,
    }
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        sys.path.insert(0, folder)
        if name == "grpo_agent":
            _make_database()
        try:
            found |= play(job, others[0]["data"], asked.calls)
        except (ConfigError, EnvironmentLostError) as error:
            first = str(error).splitlines()[0]
            found["error"] = re.sub(r" \(\S+:\d+\)", "", first)  # without paths of this machine
        finally:
            sys.path.remove(folder)
    return found


def _make_database() -> None:
    """Make the table that the script makes of a dataset, with one row."""
    with sqlite3.connect("biogrid.db") as connection:
        connection.execute("CREATE TABLE interactions (Alt_IDs_Interactor_A TEXT, Taxid_Interactor_A TEXT)")
        connection.execute("INSERT INTO interactions VALUES ('entrez gene/locuslink:JNKK', 'taxid:9606')")


def _has_played(found: dict[str, Any]) -> bool:
    """Whether a call worked in each episode."""
    episodes = found.get("episodes", [])
    return bool(episodes) and all(any(not call["is_failed"] for call in episode["calls"]) for episode in episodes)


def _git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True).stdout


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("clients", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
def main(checkout: Path, clients: Path, output: Path) -> None:
    """Convert and play the examples of CHECKOUT with the packages in CLIENTS, and write what came out to OUTPUT."""
    sys.path += [str(clients), str(clients / "site-packages")]  # behind the packages of a rank
    examples: dict[str, dict[str, Any]] = {}
    for path in _git(checkout, "ls-tree", "-r", "--name-only", COMMIT, "examples/scripts").splitlines():
        text = _git(checkout, "show", f"{COMMIT}:{path}") if path.endswith(".py") else ""
        if TRAINS.search(text) and ACTS.search(text):
            name = path.removeprefix("examples/scripts/").removesuffix(".py")
            prompt = _git(checkout, "show", f"{COMMIT}:examples/scripts/openenv/sudoku_prompt.txt")
            examples[name] = examine(name, text, prompt)
            print(name, examples[name].get("error") or examples[name]["lacks"] or "played")
    played = [name for name, found in examples.items() if not found["lacks"] and _has_played(found)]
    counts = {
        "commit": COMMIT,
        "examples": len(examples),
        "valid jobs": sum(found.get("is a valid job", False) for found in examples.values()),
        "played": len(played),
        "whole": sum(not examples[name]["not taken over"] for name in played),
    }
    print(counts)
    output.write_text(json.dumps(counts | {"each": examples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
