"""The watch over engines ends a rank whose engine is lost or hangs, and names it; a slow engine may take long."""

import json
import os
import subprocess
import sys

from support.trainer.launchers import free_ports

RANK = """
import sys, threading
from grpo_spec.contract import Engine
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.engine_watch import Timing
port, is_stuck = int(sys.argv[1]), sys.argv[2] == "stuck"
engine = Engine(name="engine-3", pod="pod-3", group="g", host="127.0.0.1", port=port, devices=(0,))
timing = Timing(poll=0.1, lost=0.5 if is_stuck else 30.0, stuck=1.5, quiet=0.1, grace=0.5)
link = EngineLink([engine], deadline=3 if sys.argv[2] == "slow" else 30, timing=timing)
link.wait_ready()
print("watching", flush=True)
if is_stuck:
    threading.Event().wait()  # as in a collective whose other ranks are gone

async def ask():
    for seed in range(2):
        (client,) = link.clients
        work = client.complete([1], model="process", num_samples=1, sampling={"seed": seed}, version=0)
        print([one.token_ids for one in await link.watch.sample(client, "process", work)], flush=True)

link.run(ask())
link.close()
"""


def run_rank(start_program, folder, how, *, engine):
    """Run a rank with an engine; with `how` "stuck", the engine is killed while the rank waits for something else.

    Returns:
        The rank's exit code, its output, its log, and the error that it recorded, without the engine's address.
    """
    (port,) = free_ports(1)
    error_file = folder / "error.json"
    server = start_program("fake_engine.py", port, "process", folder / "asked", engine)
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", RANK, str(port), how]
    rank = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert rank.stdout.readline() == "watching\n"
        if how == "stuck":
            server.kill()
        stdout, stderr = rank.communicate(timeout=60)
    finally:
        rank.kill()
    error = json.loads(error_file.read_text())["message"]["message"] if error_file.exists() else ""
    return rank.returncode, stdout, stderr, error.replace(f"127.0.0.1:{port}", "address")


def test_a_stuck_rank_is_ended_and_records_the_lost_engine(start_program, tmp_path):
    code, _, stderr, error = run_rank(start_program, tmp_path, "stuck", engine="answers")
    assert code == 1
    assert error.startswith("EngineError: engine engine-3 (pod pod-3, address) has not been healthy for")
    assert "threading.py" in stderr  # where it was stuck


def test_an_engine_that_answers_but_samples_nothing_is_named(start_program, tmp_path):
    code, stdout, _, error = run_rank(start_program, tmp_path, "asks", engine="once")
    assert (code, stdout) == (1, "[(1, 0)]\n")
    assert error == "StuckError: engine engine-3 (pod pod-3, address) hangs: it has sampled no token for 1.5 s"


def test_a_request_may_take_longer_than_the_deadline_of_calls(start_program, tmp_path):
    code, stdout, stderr, error = run_rank(start_program, tmp_path, "slow", engine="slow")
    assert (code, stdout, error) == (0, "[(1, 0)]\n[(1, 1)]\n", ""), stderr
