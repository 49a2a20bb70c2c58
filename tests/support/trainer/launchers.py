"""Real launchers on loopback ports: `World` writes the contract and starts one launcher process per pod."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from grpo_cli.local.processes import free_ports
from grpo_spec.reports import Outcome
from support.paths import PROGRAMS
from support.trainer.places import CONTRACT
from support.trainer.rank_server import SERVERS, TRAINING, Rank

T = TypeVar("T")
QUICK = {"watch": 0.2, "retry": 0.1, "report": 0.5, "lost": 1.5, "rank_grace": 2, "ahead": 0.2}
DEADLINE = 60.0

RANK_PRELUDE = """
import atexit, os, signal, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record
RANK, STATE = int(os.environ["RANK"]), Path(os.environ["GRPO_STATE_DIR"])
def sum_over_ranks():
    import torch, torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)  # gloo's threads crash an interpreter that ends under them
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)
def mark(name):
    with (STATE / name).open("a") as file:
        file.write(f"{RANK}\\n")
if os.environ.pop("GRPO_RANK_WAITS", None):
    mark("ahead")
    if not sys.stdin.readline():
        sys.exit()
@record
def main():
"""
START = """
import json, sys
from grpo_workload.launcher.launch import exit_now, main
from grpo_workload.launcher.peers import Timing
exit_now(main([sys.executable, sys.argv[1]], Timing(**json.loads(sys.argv[2]))))
"""


def eventually(read: Callable[[], T], what: str, seconds: float = DEADLINE) -> T:
    """Call `read` until it returns a true value, and return that. Fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := read()):
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return value


class Pod:
    """One member. Its folders outlive its processes, as an emptyDir outlives a container."""

    def __init__(self, world: World, name: str, port: int) -> None:
        self.world, self.name, self.port = world, name, port
        self.state = world.folder / name
        self.state.mkdir()
        self.termination_log = world.folder / f"{name}.termination-log"
        self.log = world.folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | Rank | None = None

    def start(self, uid: str = "", **environ: str) -> Pod:
        """Start the container, or start it again, with an empty termination log."""
        self.termination_log.unlink(missing_ok=True)
        ours = {
            "GRPO_CONTRACT": str(self.world.contract),
            "GRPO_STATE_DIR": str(self.state),
            "GRPO_TERMINATION_LOG": str(self.termination_log),
            "POD_NAME": self.name,
            "POD_UID": uid or f"uid-of-{self.name}",
            "OMP_NUM_THREADS": "1",
        }
        arguments = [str(self.world.script), json.dumps(self.world.timing)]
        variables = {**os.environ, **ours, **environ}
        with self.log.open("ab") as log:
            if self.world.forks:
                program = [str(PROGRAMS / "forking_launcher.py"), *arguments]
                self.process = SERVERS.start(TRAINING, program, variables, log.fileno())
            else:
                command = [sys.executable, "-c", START, *arguments]
                self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
        return self

    def signal(self, number: int) -> None:
        """Send a signal to the launcher."""
        assert self.process is not None
        self.process.send_signal(number)

    def ends(self, seconds: float = DEADLINE) -> Outcome:
        """Wait until the launcher ends and return its outcome. Asserts that both have the same exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        outcome = Outcome.model_validate_json(self.termination_log.read_text())
        assert code == outcome.exit_code, self.log.read_text()
        return outcome

    def get(self, path: str) -> tuple[int, str]:
        """GET from the launcher. Returns status and text, or 0 and the error if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def json(self, path: str) -> Any:
        """GET and parse JSON. Returns None unless the status is 200."""
        status, text = self.get(path)
        return json.loads(text) if status == 200 else None

    def rank_pids(self) -> list[int]:
        """Return the process ids of the pod's living ranks, even if their launcher is dead."""
        if self.world.forks:  # they have the launcher's command line
            threads = [] if self.process is None else Path(f"/proc/{self.process.pid}/task").glob("*/children")
            return [int(pid) for thread in threads for pid in thread.read_text().split()]
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command, environ = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is not ours
                continue
            if (
                command.endswith(f"{self.world.script}\0".encode())
                and f"GRPO_STATE_DIR={self.state}\0".encode() in environ
            ):
                found.append(int(process.name))
        return found

    def signal_ranks(self, number: int) -> None:
        """Send a signal to the pod's ranks. When a container's first process ends, they get SIGKILL."""
        for pid in self.rank_pids():
            # A child of a rank looks like the rank until it runs its own program, and may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def marks(self, name: str) -> list[int]:
        """Return the ranks that called mark(name)."""
        path = self.state / name
        return sorted(int(line) for line in path.read_text().split()) if path.exists() else []


class World:
    """Pods pod-0, pod-1, ... with `gpus` ranks each. Every rank runs `body`, the indented body of a function.

    `forks`: launchers and ranks are forked from a process that has loaded what ranks load. `durable`: the data folder
    outlives pods.
    """

    def __init__(
        self,
        folder: Path,
        gpus: list[int],
        body: str,
        *,
        timeout: int = 30,
        forks: bool = False,
        durable: bool = False,
    ) -> None:
        self.folder, self.forks = folder, forks
        self.timing: dict[str, float] = dict(QUICK)
        self.script = folder / "rank.py"
        self.script.write_text(f"{RANK_PRELUDE}{body}\nmain()\n")
        self.contract = folder / "contract.json"
        *ports, master_port = free_ports(len(gpus) + 1)
        members = [
            {
                "pod": f"pod-{index}",
                "group": "trainer",
                "host": "127.0.0.1",
                "statusPort": ports[index],
                "gpus": count,
                "rankOffset": sum(gpus[:index]),
            }
            for index, count in enumerate(gpus)
        ]
        self.values: dict[str, Any] = {
            "contractVersion": 1,
            **CONTRACT,
            "attempt": 4,
            "device": "cpu",
            "members": members,
            "masterPort": master_port,
            "timeoutSeconds": timeout,
            "durable": durable,
        }
        self.contract.write_text(json.dumps(self.values))
        self.pods = [Pod(self, f"pod-{index}", port) for index, port in enumerate(ports)]

    def start(self) -> list[Pod]:
        """Start all pods."""
        return [pod.start() for pod in self.pods]

    def announce(self, attempt: int) -> None:
        """Write the contract of another attempt, in one moment, as the kubelet renews a ConfigMap's folder."""
        fresh = self.folder / "contract.tmp"
        fresh.write_text(json.dumps(self.values | {"attempt": attempt}))
        fresh.replace(self.contract)

    def close(self) -> None:
        """Kill the pods' launchers and ranks, which a failed test may have left."""
        for pod in self.pods:
            pod.signal_ranks(signal.SIGKILL)
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()
