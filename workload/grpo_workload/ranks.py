"""The rank processes of one pod: started, signalled and ended together, and what their ends mean.

torch's elastic agent assumes the same number of ranks on every node; its multiprocessing layer underneath does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_workload.contract import ExitCode
from grpo_workload.progress import read_phase
from grpo_workload.world import Place

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

AGREED_EXITS = (ExitCode.DONE, ExitCode.STOPPED)
AFTERMATH = 0.5  # seconds in which ranks that share a collective fail together
TAIL_LINES = 15
TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int
    code: int  # as subprocess: minus the signal's number where one killed it
    at: float  # seconds since the epoch
    error: str  # exception with the end of its traceback, or the end of its log
    asked: bool = False  # it ended after this launcher had sent it SIGTERM

    @property
    def failed(self) -> bool:
        """Whether the others of the pod cannot go on."""
        return self.code not in AGREED_EXITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the ends of a pod's ranks mean together."""

    exit_code: ExitCode
    reason: str
    message: str
    rank: int | None = None
    at: float


def judge(exits: Sequence[RankExit]) -> Verdict:
    """The verdict over at least one end of a rank: the first failure decides, and without one whether any rank was stopped."""
    failures = sorted((end for end in exits if end.failed), key=lambda end: end.at)
    last = max(end.at for end in exits)
    if not failures:
        if any(end.code == ExitCode.STOPPED for end in exits):
            return Verdict(exit_code=ExitCode.STOPPED, reason="Stopped", message="stopped with a checkpoint", at=last)
        return Verdict(exit_code=ExitCode.DONE, reason="Done", message="all ranks of this pod are done", at=last)
    first = failures[0]
    if first.asked and first.code == -signal.SIGTERM:
        message = f"rank {first.rank} was stopped before it could save a checkpoint"
        return Verdict(exit_code=ExitCode.STOPPED, reason="StoppedEarly", message=message, rank=first.rank, at=first.at)
    exit_code, reason = ExitCode.RANK_FAILED, "RankFailed"
    if first.code == ExitCode.CONFIG_ERROR:
        exit_code, reason = ExitCode.CONFIG_ERROR, "ConfigError"
    message = f"rank {first.rank} {_how(first.code)}: {first.error}"
    return Verdict(exit_code=exit_code, reason=reason, message=message, rank=first.rank, at=first.at)


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (probably out of memory: raise resources.limits.memory)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def describe_error(error_file: Path, logs: Sequence[Path], *, traceback: bool = True) -> str:
    """What torch's @record left in `error_file`, with the end of its traceback; else the end of the first log that has any."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # no exception, or killed while it was written
        recorded = json.loads(error_file.read_text())["message"]
        callstack = recorded["extraInfo"]["py_callstack"].rstrip().splitlines() if traceback else []
        return "\n".join([recorded["message"], *callstack[-TAIL_LINES:]])
    for log in logs:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            if tail := file.read().decode(errors="replace").rstrip().splitlines():
                # Of faulthandler's stacks the first one, of the newest thread, tells most.
                dump = next((number for number, line in enumerate(tail) if line.startswith("Timeout (")), -TAIL_LINES)
                return "\n".join(["the end of its log is", *tail[dump:][:TAIL_LINES]])
    return "it left no log"


class Ranks:
    """The running ranks. Blocking calls go to threads of its own, so that the launcher's event loop always answers its peers."""

    def __init__(self, place: Place, processes: PContext, log_dir: Path) -> None:
        self._place = place
        self._processes = processes
        self._log_dir = log_dir
        self._asked = False
        self._popen: dict[int, subprocess.Popen[bytes]] = {rank: one.proc for rank, one in processes.subprocess_handlers.items()}
        self._threads = ThreadPoolExecutor(max_workers=place.member.gpus + 1, thread_name_prefix="ranks")

    @classmethod
    async def start(cls, place: Place, command: Sequence[str]) -> Ranks:
        """Start one process a rank with torchrun's variables; output goes to files below the state folder and, prefixed, to stdout."""
        log_dir = place.state_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        # In a thread: from the main thread, torch would put its own signal handlers in place of the launcher's.
        processes = await asyncio.to_thread(_start_processes, place, list(command), log_dir)
        return cls(place, processes, log_dir)

    async def settled(self) -> list[RankExit]:
        """Wait until all ranks have ended or one has failed; the ends seen by then, and just after."""
        loop = asyncio.get_running_loop()
        waits = {loop.run_in_executor(self._threads, self._wait, local_rank) for local_rank in self._popen}
        exits: list[RankExit] = []
        while waits and not any(end.failed for end in exits):
            done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            exits += [wait.result() for wait in done]
        if waits:  # another rank may have failed first and be slower to end
            done, _ = await asyncio.wait(waits, timeout=AFTERMATH)
            exits += [wait.result() for wait in done]
        return exits

    def _wait(self, local_rank: int) -> RankExit:
        code = self._popen[local_rank].wait()
        ended = time.time()
        rank = self._place.ranks[local_rank]
        error_file, *logs = (self._log_dir / f"rank-{rank}.{kind}" for kind in ("error.json", "stderr.log", "stdout.log"))
        # The exception was recorded before the interpreter shut down, which can take seconds.
        at = error_file.stat().st_mtime if error_file.exists() else ended
        # What a user has to mend is told in the message; where in our code it was noticed helps nobody.
        error = describe_error(error_file, logs, traceback=code != ExitCode.CONFIG_ERROR) if code not in AGREED_EXITS else ""
        if not error_file.exists() and (entered := read_phase(self._place.state_dir, rank)):
            error = f"in phase {entered[0]}; {error}"
        return RankExit(rank=rank, code=code, at=at, error=error, asked=self._asked)

    def ask_to_stop(self) -> None:
        """SIGTERM to every rank, and not to the processes it started: the trainer saves at the next step's end and needs them."""
        self._asked = True
        for process in self._popen.values():
            process.send_signal(signal.SIGTERM)

    async def end(self, grace: float) -> None:
        """End what still runs, SIGTERM first and SIGKILL after `grace` seconds, with the processes ranks left behind; flush the logs."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._end, grace)

    def _end(self, grace: float) -> None:
        closed = False
        while not closed:
            # torch signals a rank that it has seen alive, which may have been reaped since by the thread that waits for it.
            with contextlib.suppress(ProcessLookupError):
                self._processes.close(signal.SIGTERM, timeout=grace)
                closed = True
        for process in self._popen.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _start_processes(place: Place, command: list[str], log_dir: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std, start_processes

    class RankLogs(LogsSpecs):  # type: ignore[misc]  # torch.distributed.elastic is untyped
        """Files named by global rank; torch's own scheme has a random folder and the local rank."""

        @property
        def root_log_dir(self) -> str:
            return str(log_dir)

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            def files(kind: str) -> dict[int, str]:
                return {local_rank: str(log_dir / f"rank-{env['RANK']}.{kind}") for local_rank, env in envs.items()}

            for local_rank, path in files("error.json").items():
                envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = path
                Path(path).unlink(missing_ok=True)
            out, err = files("stdout.log"), files("stderr.log")
            return LogsDest(stdouts=out, stderrs=err, tee_stdouts=out, tee_stderrs=err, error_files=files("error.json"))

    # torch warns that it could not install its signal handlers: the launcher has its own.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    local_ranks = range(place.member.gpus)
    return start_processes(
        name="rank",
        entrypoint=command[0],
        args={local_rank: tuple(command[1:]) for local_rank in local_ranks},
        envs={local_rank: {**place.rank_env(local_rank), "PYTHONUNBUFFERED": "1"} for local_rank in local_ranks},
        logs_specs=RankLogs(log_dir=str(log_dir), redirects=Std.ALL, tee=Std.ALL),
        log_line_prefixes={local_rank: f"[rank {place.ranks[local_rank]}] " for local_rank in local_ranks},
    )
