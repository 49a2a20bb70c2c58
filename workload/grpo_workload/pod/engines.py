"""vLLM servers as processes of an engine pod, or of a trainer pod that also runs ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from grpo_spec.contract import Contract, Engine
from grpo_workload.pod.empty_adapter import empty_adapter_folder, write_empty_adapter
from grpo_workload.pod.vllm_command import engine_command

TAIL_LINES = 30
LINE_BYTES = 2**20
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
# The last line of a traceback, bare or logged. The end of the log is not enough: when a worker fails, the server itself
# only says "see root cause above".
_EXCEPTION = re.compile(r"(?:^|\] )([\w.]+(?:Error|Exception): .*)$")


class EngineProcess:
    """One running vLLM server. Copies its output to stdout, prefixed with its name, and keeps the last lines."""

    def __init__(self, engine: Engine, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
        self.engine = engine
        self._process = process
        self._output = output
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._first_error = ""
        self._copying = asyncio.create_task(self._copy())

    @classmethod
    async def start(cls, engine: Engine, command: Sequence[str], environ: Mapping[str, str]) -> EngineProcess:
        """Start the server and its workers in a new process group."""
        # Not asyncio's own pipe: with it, waiting for the server would also wait for all workers that hold the pipe.
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb")
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        return cls(engine, process, output)

    async def wait(self) -> str:
        """Wait until the server ends. Returns what happened: the engine's name, the cause, and its last output."""
        code = await self._process.wait()
        # Limited, because workers that outlive the server keep the pipe open.
        await asyncio.wait({self._copying}, timeout=1)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (probably out of memory: raise resources.limits.memory)" if code == -signal.SIGKILL else ""
        first = f"; its first error is {self._first_error}" if self._first_error else ""
        return f"engine {self.engine.name} {how}{hint}{first}; the end of its log is\n" + "\n".join(self._tail)

    async def stop(self, grace: float = GRACE) -> None:
        """Stop the server and all its workers: SIGTERM first, SIGKILL after `grace` seconds."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._copying

    async def _copy(self) -> None:
        while text := await self._read_line():
            text = text.rstrip()
            self._tail.append(text)
            if not self._first_error and (error := _EXCEPTION.search(text)):
                self._first_error = error[1]
            sys.stdout.write(f"[{self.engine.name}] {text}\n")
            sys.stdout.flush()

    async def _read_line(self) -> str:
        """The next line of the output, with its newline; empty at the end."""
        try:
            return (await self._output.readline()).decode(errors="replace")
        except (
            ValueError
        ):  # asyncio drops what it has of a line over the limit; reading must go on, or the pipe fills up
            return f"[part of a line over {LINE_BYTES} bytes was left out]\n"


@asynccontextmanager
async def running_engines(contract: Contract, engines: Sequence[Engine]) -> AsyncIterator[asyncio.Task[str]]:
    """Run engines as processes of this pod while the context is open.

    Yields a task that ends when the first engine ends, and says what happened. Raises ConfigError as `engine_command`
    does, before any engine is started.
    """
    if contract.config.pushes_adapters:
        write_empty_adapter(empty_adapter_folder())
    commands = [(engine, *engine_command(contract, engine)) for engine in engines]
    processes: list[EngineProcess] = []
    first_exit: asyncio.Task[str] | None = None
    try:
        for engine, command, environ in commands:
            processes.append(await EngineProcess.start(engine, command, environ))
        first_exit = asyncio.create_task(_first_exit(processes))
        yield first_exit
    finally:
        if first_exit is not None:
            first_exit.cancel()
        await asyncio.gather(*(process.stop() for process in processes))


async def _first_exit(processes: Sequence[EngineProcess]) -> str:
    if not processes:
        await asyncio.Event().wait()  # a pod without engines never loses one
    exits = [asyncio.create_task(process.wait()) for process in processes]
    done, rest = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
    for one in rest:
        one.cancel()
    return done.pop().result()
