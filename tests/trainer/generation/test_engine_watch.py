"""The watch over engines ends a rank that is stuck when its engine is lost, and records the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.trainer.launchers import free_ports

STUCK = """
import sys, threading
from aiohttp import web
from grpo_workload.spec.contract import Engine
from grpo_workload.generation.servers.engine_watch import EngineLink, Timing
port = int(sys.argv[1])
engine = Engine(name="engine-3", pod="pod-3", group="g", host="127.0.0.1", port=port, devices=(0,), rank_offset=1)
link = EngineLink([engine], deadline=30, timing=Timing(poll=0.1, lost=0.5, grace=0.5))
link.wait_ready()
print("watching", flush=True)
threading.Event().wait()  # as in a collective whose other ranks are gone
"""
SERVER = """
import sys
from aiohttp import web
async def health(_):
    return web.Response()
app = web.Application()
app.add_routes([web.get("/health", health)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


def test_a_stuck_rank_is_ended_and_records_the_lost_engine(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    error_file = tmp_path / "error.json"
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    environ = {"PATH": "/usr/bin:/bin", "TORCHELASTIC_ERROR_FILE": str(error_file), "OMP_NUM_THREADS": "1"}
    rank = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(port)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "watching\n"
        server.kill()
        _, stderr = rank.communicate(timeout=30)
    finally:
        server.kill()
        rank.kill()
        server.wait()
    assert rank.returncode == 1
    message = json.loads(error_file.read_text())["message"]["message"]
    assert message.startswith(f"EngineError: engine engine-3 (pod pod-3, 127.0.0.1:{port}) has not been healthy for")
    assert "threading.py" in stderr  # where it was stuck
