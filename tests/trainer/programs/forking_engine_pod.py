"""An engine pod on CPUs that forks vLLM servers, which fork their workers: forking_engine_pod.py, without arguments.

It is itself forked from a process that has loaded vLLM (`support.trainer.rank_server`), so no server loads it again, in
10 s of CPU. vLLM forks its workers by default, but not on CPUs, where a variable makes fresh processes load the OpenMP
library that binds threads to cores. Tests bind none.

tests/e2e starts pods and servers as the product does.
"""

import asyncio
import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from forks import fork

from grpo_workload.pod import engine_main, vllm_command


class ForkedServer:
    """A forked vLLM server, with the methods of asyncio.subprocess.Process that the pod calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.create_task(self._wait())

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def _wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        process = os.pidfd_open(self.pid)
        loop.add_reader(process, ended.set)
        await ended.wait()
        loop.remove_reader(process)
        os.close(process)
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222  # it has ended
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


async def fork_server(*command: str, env: Mapping[str, str], stdout: int, **_: Any) -> ForkedServer:
    """Start a server in a session of its own, as the pod's call of asyncio.create_subprocess_exec would."""
    *program, module = command[: len(vllm_command.SERVER)]
    assert (*program, module) in (vllm_command.SERVER, vllm_command.FOLLOWER)

    def run() -> None:
        sys.argv = [module, *command[len(vllm_command.SERVER) :]]
        _fork_workers()
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return ForkedServer(fork(run, env, stdout=stdout, stderr=stdout))


def _fork_workers() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "vLLM no longer sets what this changes"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)
    # Workers wait actively for a second after each of the server's words: all the CPU of a test's machine.
    SpinCondition.__init__.__defaults__ = (0.01,)


if __name__ == "__main__":
    asyncio.create_subprocess_exec = fork_server  # type: ignore[assignment]
    sys.exit(engine_main.main())
