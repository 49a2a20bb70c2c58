"""Environments of verifiers and OpenEnv, from their packages: episodes word for word, and a job that trains on them.

AGENT_PACKAGES=FOLDER says where `scripts/agent_packages.sh FOLDER` has put them. They cannot stand in the environment
of the tests, as verifiers wants an older openai than vLLM. verifiers needs `uv` on the PATH, with which it installs
what its program needs.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from grpo_spec.reports import ExitCode
from support.paths import ROOT
from support.trainer.gateway import Engine, config_of, play, start
from support.trainer.launchers import eventually, free_ports
from support.trainer.rank_server import PYTHONPATH
from support.trainer.trainings import lines_of, make_config

pytestmark = pytest.mark.long
VERIFIERS, OPENENV = "support.trainer.with_verifiers:play", "support.trainer.with_openenv:play"
CALL = '<tool_call>\n{"name": "calculator_multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def port():
    """The port of an OpenEnv server."""
    (number,) = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests/support/trainer/with_openenv.py", str(number)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    try:
        with closing(socket.socket()) as trial:
            eventually(lambda: trial.connect_ex(("127.0.0.1", number)) == 0, "the server listens", 120)
        yield number
    finally:
        server.kill()
        server.wait()


def played(program, engine, monkeypatch, **row):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    config = config_of(program=program, timeoutSeconds=200, env=["AGENT_PACKAGES"])
    sessions = start(config)
    try:
        completion, _ = play(sessions, config, engine, "", seconds=300, **row)
    finally:
        sessions.close()
    assert completion.episode.lost is None, completion.episode.failure
    whole = [*completion.episode.prompt_ids, *completion.token_ids]
    assert all(whole[: len(ask.token_ids)] == ask.token_ids for ask in engine.asked)
    return completion.episode, engine.tokenizer.decode(whole)


def exchange(*turns):
    """Return what the template writes of a user's and the model's turns."""
    roles = ["user", "assistant"] * len(turns)
    return "\n".join(f"<|im_start|>{role}\n{turn}<|im_end|>" for role, turn in zip(roles, turns, strict=False))


def test_verifiers_speaks_in_several_turns(monkeypatch):
    engine = Engine("Hello.", "42.")
    episode, text = played(VERIFIERS, engine, monkeypatch, says=["Hi.", "6 x 7?"], answer="42")
    assert (episode.reward, text) == (1, exchange("Hi.", "Hello.", "6 x 7?", "42."))


def test_verifiers_calls_its_own_tool(monkeypatch):
    engine = Engine(CALL, "It is 42.")
    episode, text = played(VERIFIERS, engine, monkeypatch, says=["6 x 7?"], answer="42")
    assert (episode.reward, episode.num_calls) == (1, 1)
    result = "<tool_response>\n42\n</tool_response>"
    assert text.endswith(exchange("6 x 7?", CALL, result, "It is 42."))


def test_openenv_plays_a_game(monkeypatch, port):
    engine, row = Engine("50?", "75", "70"), {"number": 70, "port": port, "temperature": 1.0}
    episode, text = played(OPENENV, engine, monkeypatch, **row)
    assert episode.reward == pytest.approx(1 / 3)
    assert text == exchange("I think of a number from 1 to 100.", "50?", "larger", "75", "smaller", "70")


@pytest.mark.vllm
def test_a_job_trains_on_both(start_training, tiny_model, tmp_path, port):
    rows = [
        {
            "prompt": [{"role": "user", "content": "Unused."}],
            "environment": name,
            "says": ["Hi.", "6 x 7?"],
            "answer": "4",
            "number": 7,
            "port": port,
            "temperature": 1.0,
        }
        for name in ("verifiers", "openenv")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = make_config(tiny_model, max_steps=1, engine="vLLM")
    config["dataset"] = {"path": str(tmp_path / "rows.jsonl")}
    config["environments"] = [
        {"name": name, "program": program, "timeoutSeconds": 200, "env": ["AGENT_PACKAGES"]}
        for name, program in (("verifiers", VERIFIERS), ("openenv", OPENENV))
    ]
    config["rewards"] += [{"name": "own", "environment": {}}]
    config["generation"]["maxModelLen"] = 512
    config["training"] |= {"promptsPerStep": 2, "maxCompletionLength": 300}
    ranks = start_training(config, 1)
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    run_dir = tmp_path / "data" / "ns" / "job" / "uid"
    (journal,) = run_dir.glob("journal/*/*/*.gz")
    asked = [group["completions"][0]["episode"]["asked"][0]["content"][:2] for group in lines_of(journal)]
    assert sorted(asked) == ["Hi", "I "]
    (line,) = lines_of(run_dir / "metrics.jsonl")
    assert (line["episodes/lost"], line["rewards/own/unscored"]) == (0, 0)
    assert line["trained/sampling/sampling_logp_difference/max"] < 1e-3
    assert line["grad_norm"] > 0
