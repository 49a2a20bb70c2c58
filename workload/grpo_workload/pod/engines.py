"""vLLM servers as processes of an engine pod, or of a trainer pod that also runs ranks.

Those of an engine pod go on when a later attempt begins in it: they have loaded the model and compiled what they run,
and the attempt pushes all weights to them anyway.
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
from typing import Any

import aiohttp

from grpo_spec.contract import Contract, Engine
from grpo_workload.pod.empty_adapter import empty_adapter_folder, write_empty_adapter
from grpo_workload.pod.meeting import Node
from grpo_workload.pod.vllm_command import engine_command

logger = logging.getLogger(__name__)

TAIL_LINES = 30
LINE_BYTES = 2**20
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
ANSWER_SECONDS = 10.0  # for an engine that is to go on: it may first have to give up a push whose sender is gone
# The last line of a traceback, bare or logged. The end of the log is not enough: when a worker fails, the server itself
# only says "see root cause above".
_EXCEPTION = re.compile(r"(?:^|\] )([\w.]+(?:Error|Exception): .*)$")


_ABANDONED = "abandoned in attempt "


def abandoned(attempt: int) -> str:
    """Return the version of weights that are not an attempt's: of an engine that goes on, or of an abandoned update."""
    return f"{_ABANDONED}{attempt}"


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
        return f"engine {self.engine.name} {how}{hint}{first}\nthe end of its log:\n" + "\n".join(self._tail)

    async def weight_version(self) -> str | None:
        """Return the version of the engine's weights; None if its core does not answer, as one that hangs."""
        return await self._ask("GET", "/weight_info", "weight_version")

    async def go_on(self, attempt: int) -> bool:
        """Tell the ranks of an attempt that the engine is theirs. Return whether it has taken that."""
        version = abandoned(attempt)
        return version == await self._ask(
            "POST", "/update_weight_version", "new_version", json={"new_version": version}
        )

    async def _ask(self, method: str, path: str, field: str, **request: Any) -> str | None:
        if self._process.returncode is not None:
            return None
        url, timeout = f"http://127.0.0.1:{self.engine.port}{path}", aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, **request) as response,
            ):
                return str((await response.json())[field]) if response.ok else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            logger.info("engine %s does not answer: %r", self.engine.name, error)
            return None

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


class PodEngines:
    """The engines of a pod, which may go on from one attempt to the next."""

    def __init__(self) -> None:
        self._processes: list[EngineProcess] = []
        self._made_for: object = None  # what they were started with
        self._were_pushed_to = False  # whether the last attempt found that the one before had pushed to all

    async def begin(self, contract: Contract, engines: Sequence[Engine], node: Node | None = None) -> asyncio.Task[str]:
        """Start the engines, unless the same ones run already and can go on; then they do.

        `node`: the pod's place in its engine over several pods, of which none knows whether the others can go on.

        Returns a task that ends when the first engine ends, and says what happened. Raises ConfigError as
        `engine_command` does, before any engine is started.
        """
        wanted = (contract.config, contract.device, tuple(engines))
        if node is None and wanted == self._made_for and await self._go_on(contract.attempt):
            logger.info("attempt %d: engines go on, with what they have loaded and compiled", contract.attempt)
        else:
            await self.stop()
            await self._start(contract, engines, node)
            self._made_for, self._were_pushed_to = wanted, False
        return asyncio.create_task(_first_exit(self._processes))

    async def stop(self) -> None:
        """Stop all engines; does nothing if none runs."""
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.stop() for process in processes))

    async def _go_on(self, attempt: int) -> bool:
        """Let all go on if they answer and have the weights of a push, and tell the ranks; else return False.

        Ranks use none before. Those that two attempts pushed nothing to are better started again. One attempt alone may
        have been killed after it had abandoned what the one before left.
        """
        found = await asyncio.gather(*(one.weight_version() for one in self._processes))
        versions = [version or "" for version in found]
        may_be_abandoned, self._were_pushed_to = self._were_pushed_to, all(one.isdecimal() for one in versions)
        if not all(one.isdecimal() or (may_be_abandoned and one.startswith(_ABANDONED)) for one in versions):
            return False
        return bool(versions) and all(await asyncio.gather(*(one.go_on(attempt) for one in self._processes)))

    async def _start(self, contract: Contract, engines: Sequence[Engine], node: Node | None) -> None:
        if contract.config.pushes_adapters:
            write_empty_adapter(empty_adapter_folder())
        commands = [(engine, *engine_command(contract, engine, node=node)) for engine in engines]
        for engine, command, environ in commands:
            self._processes.append(await EngineProcess.start(engine, command, environ))


@asynccontextmanager
async def running_engines(contract: Contract, engines: Sequence[Engine]) -> AsyncIterator[asyncio.Task[str]]:
    """Run engines as processes of this pod while the context is open.

    Yields the task of `PodEngines.begin`, which also says what it raises.
    """
    own, first_exit = PodEngines(), None
    try:
        yield (first_exit := await own.begin(contract, engines))
    finally:
        if first_exit is not None:
            first_exit.cancel()
        await own.stop()


async def _first_exit(processes: Sequence[EngineProcess]) -> str:
    if not processes:
        await asyncio.Event().wait()  # a pod without engines never loses one
    exits = [asyncio.create_task(process.wait()) for process in processes]
    try:
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for one in exits:
            one.cancel()
