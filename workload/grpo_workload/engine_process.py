"""The first process of a generation pod: `python -m grpo_workload.engine_process`.

Reads the contract, starts this pod's vLLM servers, and leaves one outcome behind as the launcher of a trainer pod does: in the state
folder, as the container's termination message, and as the exit code. It runs an epoch once; started again, it holds, since an engine
that is started again would generate from the initial weights. `EngineProcess` also serves launchers that have engines beside their ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_workload.contract import (
    ENV_POD_NAME,
    ENV_POD_UID,
    ENV_STATE_DIR,
    ENV_TERMINATION_LOG,
    STATE_DIR,
    TERMINATION_LOG,
    Contract,
    Engine,
    ExitCode,
    Outcome,
)
from grpo_workload.devices import check_devices
from grpo_workload.empty_adapter import empty_adapter_folder, write_empty_adapter
from grpo_workload.engine_command import engine_command
from grpo_workload.run_once import RunOnce, launcher_died
from grpo_workload.world import ContractError, read_contract

logger = logging.getLogger(__name__)

TAIL_LINES = 30
LINE_BYTES = 2**20
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
# The last line of a traceback, bare or logged. vLLM's server fails with "see root cause above" when a worker of it has failed.
_EXCEPTION = re.compile(r"(?:^|\] )([\w.]+(?:Error|Exception): .*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """A generation pod and its engines."""

    contract: Contract
    pod: str
    pod_uid: str
    state_dir: Path
    termination_log: Path

    @property
    def engines(self) -> list[Engine]:
        """Those that run on this pod."""
        return [engine for engine in self.contract.engines if engine.pod == self.pod]


def read_engine_pod(environ: Mapping[str, str]) -> EnginePod:
    """The pod as the contract describes it. Raises as `read_contract`, and ContractError when no engine belongs to it."""
    contract = read_contract(environ)
    pod = EnginePod(
        contract=contract,
        pod=environ[ENV_POD_NAME],
        pod_uid=environ[ENV_POD_UID],
        state_dir=Path(environ.get(ENV_STATE_DIR, STATE_DIR)),
        termination_log=Path(environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)),
    )
    if not pod.engines:
        names = ", ".join(engine.pod for engine in contract.engines) or "none"
        raise ContractError(f"{ENV_POD_NAME} {pod.pod!r} must name the pod of an engine; the contract has: {names}", contract.epoch)
    return pod


class EngineProcess:
    """One running vLLM server. Its output goes to stdout under its name, and the end of it is kept."""

    def __init__(self, engine: Engine, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
        self.engine = engine
        self._process = process
        self._output = output
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._first_error = ""
        self._copying = asyncio.create_task(self._copy())

    @classmethod
    async def start(cls, engine: Engine, command: Sequence[str], environ: Mapping[str, str]) -> EngineProcess:
        """Start it in a process group of its own, with its workers."""
        # A pipe of our own: asyncio's would make the wait for the server one for all workers that hold the pipe, too.
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb"))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=write_end, stderr=write_end, start_new_session=True
            )
        finally:
            os.close(write_end)
        return cls(engine, process, output)

    async def ended(self) -> str:
        """Wait for its end: what happened, naming the engine, with the end of its output."""
        code = await self._process.wait()
        # Workers that outlive the server hold the pipe open.
        await asyncio.wait({self._copying}, timeout=1)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (probably out of memory: raise resources.limits.memory)" if code == -signal.SIGKILL else ""
        first = f"; its first error is {self._first_error}" if self._first_error else ""
        return f"engine {self.engine.name} {how}{hint}{first}; the end of its log is\n" + "\n".join(self._tail)

    async def end(self, grace: float = GRACE) -> None:
        """End it with all its workers: SIGTERM first, SIGKILL after `grace` seconds."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._copying

    async def _copy(self) -> None:
        while line := await self._output.readline():
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            if not self._first_error and (error := _EXCEPTION.search(text)):
                self._first_error = error[1]
            sys.stdout.write(f"[{self.engine.name}] {text}\n")
            sys.stdout.flush()


async def run_engines(pod: EnginePod) -> Outcome:
    """Run this pod's engines until the first ends or this process is stopped, or hold if they have run before; how it ended."""
    once = RunOnce(pod)
    if once.begun and once.result is None:
        once.finish(outcome := launcher_died(pod))
        return outcome
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if ended := once.result:
        once.tell(ended)
        logger.info("epoch %d has ended here with %s; waiting to be deleted", ended.epoch, ended.reason)
        await stop.wait()
        return ended
    once.begin()
    outcome = await _run(pod, stop)
    once.finish(outcome)
    logger.info("ended with %s: %s", outcome.reason, outcome.message)
    return outcome


@asynccontextmanager
async def running(contract: Contract, engines: Sequence[Engine]) -> AsyncIterator[asyncio.Task[str]]:
    """Run engines as processes of this pod; a task that ends when the first of them does, with what happened. They end with the context.

    Raises ValueError as `engine_command`, before any is started.
    """
    if contract.config.pushes_adapters:
        write_empty_adapter(empty_adapter_folder())
    commands = [(engine, *engine_command(contract, engine)) for engine in engines]
    processes = [await EngineProcess.start(engine, command, environ) for engine, command, environ in commands]
    first = asyncio.create_task(_first_end(processes))
    try:
        yield first
    finally:
        first.cancel()
        await asyncio.gather(*(process.end() for process in processes))


async def _first_end(processes: Sequence[EngineProcess]) -> str:
    if not processes:
        await asyncio.Event().wait()  # a pod without engines never loses one
    ends = [asyncio.create_task(process.ended()) for process in processes]
    done, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in rest:
        end.cancel()
    return done.pop().result()


async def _run(pod: EnginePod, stop: asyncio.Event) -> Outcome:
    stopped = asyncio.create_task(stop.wait())
    try:
        await check_devices(pod.contract, pod.pod)
        async with running(pod.contract, pod.engines) as ended:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return _outcome(pod, ExitCode.RANK_FAILED, "EngineDied", f"pod {pod.pod}: {ended.result()}")
            return _outcome(pod, ExitCode.STOPPED, "Stopped", f"pod {pod.pod} was stopped, and its engines with it")
    except ValueError as error:
        return _outcome(pod, ExitCode.CONFIG_ERROR, "ConfigError", str(error))
    finally:
        stopped.cancel()


def _outcome(pod: EnginePod, exit_code: ExitCode, reason: str, message: str) -> Outcome:
    return Outcome(epoch=pod.contract.epoch, pod_uid=pod.pod_uid, exit_code=exit_code, reason=reason, message=message)


def main() -> int:
    """Run this pod's engines as the environment says; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        pod = read_engine_pod(os.environ)
    except ValueError as error:
        logger.error("%s", error)
        if isinstance(error, ContractError):
            refused = Outcome(
                epoch=error.epoch,
                pod_uid=os.environ.get(ENV_POD_UID, ""),
                exit_code=ExitCode.CONFIG_ERROR,
                reason="ContractRefused",
                message=str(error),
            )
            Path(os.environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)).write_text(refused.to_message())
        return ExitCode.CONFIG_ERROR
    return asyncio.run(run_engines(pod)).exit_code


if __name__ == "__main__":
    sys.exit(main())
