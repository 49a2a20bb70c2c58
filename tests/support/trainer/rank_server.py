"""Ranks that need not load torch, transformers, DeepSpeed and vLLM: a process that has loaded them forks each rank.

Loading takes a fresh rank 9 to 20 s of CPU, often more than its test. A forked rank gets the environment, arguments,
folder and output of a fresh one, and its interpreter ends in the same way. It differs in three things: all ranks of a
server share the seed of Python's hashes, /proc/PID shows the server's command and environment, and what libraries read
while they are imported is the server's. So ranks with other variables get another server (`RankServers`).

tests/trainer/launcher/test_launch.py and tests/e2e start ranks as the product does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from support.paths import PROGRAMS

TRAINING = (
    "grpo_workload.training.train",
    "transformers.models.llama.modeling_llama",
    # Every rank loads these late, in 1 s of CPU, for data sets.
    "reasoning_gym",
    "pandas",
)
WITH_VLLM = (
    *TRAINING,
    "grpo_workload.generation.colocate",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "grpo_workload.pod.engine_main",
    "vllm.entrypoints.openai.api_server",
)
OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "POD_UID", "RESULTS"}
OF_A_RANK |= {"GRPO_STATE_DIR", "GRPO_CONTRACT", "GRPO_DATA_DIR", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST"}
OF_A_RANK |= {"POD_NAME", "GRPO_TERMINATION_LOG", "ORDER"}  # of pods, and of a test's reward function
"""Variables that no library reads while it is imported."""
PYTHONPATH = os.pathsep.join([str(PROGRAMS), *sys.path])
"""PYTHONPATH of everything that is forked. A rank that needs another one gets a new server."""
HARMLESS = {"jemalloc_bg_thd"}  # pyarrow's allocator starts it again in a forked process


class Rank:
    """A forked rank, with the methods of subprocess.Popen."""

    def __init__(self, status: int) -> None:
        """`status`: the end of a pipe from which the process id can be read, and the exit code once there is one."""
        self._status = os.fdopen(status)
        line = self._status.readline()
        assert line, "the server has ended before it forked the rank; it has said why on stderr"
        self.pid = int(line)
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked rank {self.pid}", timeout or 0)
            with self._lock:  # as subprocess.Popen's: a test and its watch may wait in two threads
                if self.returncode is None:
                    self.returncode = int(self._status.readline())
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RankServer:
    """A process that loads `modules` and then forks ranks, which have the same variables except for `OF_A_RANK`."""

    def __init__(self, modules: tuple[str, ...], environ: dict[str, str]) -> None:
        self.environ = environ
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "support.trainer.rank_server", str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(self, command: list[str], environ: dict[str, str], log: int) -> Rank:
        """Start `python COMMAND...`, a file or -m and a module, with its output in the open file `log`."""
        request = {"command": command, "environ": environ, "folder": os.getcwd()}
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [log, theirs])
        finally:
            os.close(theirs)
        return Rank(status)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


class RankServers:
    """One server for each set of modules, begun again where ranks have other variables than the last ones."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], RankServer] = {}

    def start(self, modules: tuple[str, ...], command: list[str], environ: dict[str, str], log: int) -> Rank:
        """Start a rank (`RankServer.start`) that needs no import of `modules`."""
        shared = {name: value for name, value in environ.items() if name not in OF_A_RANK}
        server = self._servers.get(modules)
        if server is None or server.environ != shared:
            if server is not None:
                server.close()
            server = self._servers[modules] = RankServer(modules, shared)
        return server.start(command, environ, log)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


SERVERS = RankServers()
"""Those of this process: ranks, and pods of engines (`support.trainer.engines`). They end with it."""


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Returns in each of them, with the request; in the server None, at its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the ranks
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 2**20, 2)
        if not message:
            return None
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        others = sorted(threads)
        others.remove(Path("/proc/self/comm").read_text().strip())
        assert set(others) <= HARMLESS, f"a forked rank would lack the server's threads {others}"
        if os.fork() == 0:
            channel.close()
            return _wait_for_rank(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_rank(request: dict[str, Any], log: int, status: int) -> dict[str, Any]:
    """Fork the rank, in which this returns. Write its process id and, when it has ended, its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.close(status)
        for output in (1, 2):
            os.dup2(log, output)
        os.close(log)
        return request
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _run(command: list[str], environ: dict[str, str], folder: str) -> None:
    """Run a program as `python COMMAND...` would."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    gc.unfreeze = lambda: None  # vLLM calls it at its end, and collects then: all that the server has loaded, too
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator sees the fork, and torch's begins with a constant
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device.CPU, os.environ)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # a collection in a rank would copy the pages of all these objects
    if (request := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run(**request)


if __name__ == "__main__":
    main()
