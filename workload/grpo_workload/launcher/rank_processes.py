"""The rank processes of one pod: starts, signals and stops them together, and sums up how they ended.

Not by torch's elastic agent, which needs the same number of ranks on every node, nor by the layer below it: to import
torch would take longer than all else that a launcher does before its ranks begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.rank_logs import LogCopies
from grpo_workload.reporting.progress_files import read_phase

CLEAN_EXITS = (ExitCode.DONE, ExitCode.STOPPED)
EXPLAINED: dict[int, tuple[ExitCode, Reason]] = {
    ExitCode.CONFIG_ERROR: (ExitCode.CONFIG_ERROR, Reason.CONFIG_ERROR),
    ExitCode.NOT_FINITE: (ExitCode.RANK_FAILED, Reason.NOT_FINITE),
    ExitCode.WEIGHTS_DIFFER: (ExitCode.RANK_FAILED, Reason.WEIGHTS_DIFFER),
    ExitCode.OUT_OF_MEMORY: (ExitCode.RANK_FAILED, Reason.OUT_OF_MEMORY),
    ExitCode.ENVIRONMENT_FAILED: (ExitCode.RANK_FAILED, Reason.ENVIRONMENT_FAILED),
}
"""Exit codes of ranks whose message says what happened and what to do: no traceback is needed. With each, the exit code
and the reason of the pod."""
SETTLE_SECONDS = 0.5  # time within which ranks that share a collective fail together
KILL_SECONDS = 30  # for the kernel to end a killed process: it may wait for a device
TAIL_LINES = 15
TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The end of one rank."""

    rank: int
    code: int  # exit code, or minus the number of the signal that killed it
    at: float  # time, in seconds since 1970
    error: str  # its exception with the end of the traceback, or the end of its log
    asked: bool = False  # whether this launcher had sent it SIGTERM before

    @property
    def failed(self) -> bool:
        """Whether it failed, so that the pod's other ranks cannot go on."""
        return self.code not in CLEAN_EXITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a pod's ranks, taken together."""

    exit_code: ExitCode
    reason: Reason
    message: str
    rank: int | None = None  # the rank that failed first
    at: float  # time of the first failure, else of the last exit; seconds since 1970


def log_dir_of(place: Place) -> Path:
    """Return the folder of the logs of a pod's ranks."""
    return place.state_dir / "logs"


def result_of(exits: Sequence[RankExit]) -> Result:
    """Sum up at least one exit: the first failure decides. If none failed, they were stopped if any rank was."""
    failures = sorted((one for one in exits if one.failed), key=lambda one: one.at)
    if not failures:
        last = max(one.at for one in exits)
        if any(one.code == ExitCode.STOPPED for one in exits):
            message = "stopped with a checkpoint"
            return Result(exit_code=ExitCode.STOPPED, reason=Reason.STOPPED, message=message, at=last)
        return Result(exit_code=ExitCode.DONE, reason=Reason.DONE, message="all ranks of this pod are done", at=last)
    first = failures[0]
    if first.asked and first.code == -signal.SIGTERM:
        message = f"rank {first.rank} was stopped before it could save a checkpoint"
        exit_code, reason = ExitCode.STOPPED, Reason.STOPPED_EARLY
    else:
        message = f"rank {first.rank} {_describe_code(first.code)}: {first.error}"
        exit_code, reason = EXPLAINED.get(first.code, (ExitCode.RANK_FAILED, Reason.RANK_FAILED))
    return Result(exit_code=exit_code, reason=reason, message=message, rank=first.rank, at=first.at)


def _describe_code(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (probably out of memory: raise resources.limits.memory)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def describe_error(error_file: Path, logs: Sequence[Path], *, traceback: bool = True) -> str:
    """Return the exception that torch's @record wrote, with the end of its traceback.

    If there is none, return the end of the first log that is not empty.
    """
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # no exception, or killed while writing it
        recorded = json.loads(error_file.read_text())["message"]
        callstack = recorded["extraInfo"]["py_callstack"].rstrip().splitlines() if traceback else []
        return "\n".join([recorded["message"], *callstack[-TAIL_LINES:]])
    for log in logs:
        if tail := end_of(log, TAIL_BYTES):
            # The first of faulthandler's stacks is the newest thread's and says most.
            dump = next((number for number, line in enumerate(tail) if line.startswith("Timeout (")), -TAIL_LINES)
            return "\n".join(["the end of its log:", *tail[dump:][:TAIL_LINES]])
    return "it left no log"


def end_of(log: Path, num_bytes: int) -> list[str]:
    """Return the lines of a log's last bytes, of which the first may be cut."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - num_bytes))
        return file.read().decode(errors="replace").rstrip().splitlines()


class Ranks:
    """The running ranks. Blocking calls run in its own threads, so that the event loop can always answer peers."""

    def __init__(self, place: Place) -> None:
        """Prepare for the ranks of this pod; `start` starts them."""
        self._place, self._copies, self._log_dir = place, LogCopies(), log_dir_of(place)
        self._popen: dict[int, Popen[bytes]] = {}  # by local rank
        self._asked = False
        self._threads = ThreadPoolExecutor(max_workers=place.member.gpus + 1, thread_name_prefix="ranks")

    @classmethod
    def start(cls, place: Place, command: Sequence[str]) -> Ranks:
        """Start one process per rank with torchrun's variables, each in a session of its own.

        Output goes to files in the state folder and, prefixed with the rank, to stdout and stderr. Raises OSError if
        one cannot be started; those before it are killed.
        """
        ranks = cls(place)
        ranks._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for local_rank in range(len(place.ranks)):
                ranks._start(local_rank, command)
        except BaseException:
            ranks._stop(grace=0)
            raise
        return ranks

    def _start(self, local_rank: int, command: Sequence[str]) -> None:
        rank = self._place.ranks[local_rank]
        error = self._error_file(rank)
        error.unlink(missing_ok=True)
        variables = added_variables(self._place, local_rank, os.environ) | {"TORCHELASTIC_ERROR_FILE": str(error)}
        out, err = (self._log_dir / f"rank-{rank}.{kind}.log" for kind in ("stdout", "stderr"))
        with out.open("w") as stdout, err.open("w") as stderr:
            self._popen[local_rank] = Popen(
                list(command), env=os.environ | variables, stdout=stdout, stderr=stderr, start_new_session=True
            )
        self._copies.begin(out, f"[rank {rank}] ", sys.stdout)
        self._copies.begin(err, f"[rank {rank}] ", sys.stderr)

    async def settle(self) -> list[RankExit]:
        """Wait until all ranks have ended or one has failed. Returns the exits until then and shortly after."""
        loop = asyncio.get_running_loop()
        waits = {loop.run_in_executor(self._threads, self._wait, local_rank) for local_rank in self._popen}
        exits: list[RankExit] = []
        while waits and not any(one.failed for one in exits):
            done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            exits += [wait.result() for wait in done]
        if waits:  # another rank may have failed first and take longer to exit
            done, _ = await asyncio.wait(waits, timeout=SETTLE_SECONDS)
            exits += [wait.result() for wait in done]
        return exits

    def _wait(self, local_rank: int) -> RankExit:
        code = self._popen[local_rank].wait()
        ended = time.time()
        rank = self._place.ranks[local_rank]
        error_file = self._error_file(rank)
        logs = [self._log_dir / f"rank-{rank}.{kind}" for kind in ("stderr.log", "stdout.log")]
        # The exception was recorded before the interpreter shut down, and that can take seconds.
        at = error_file.stat().st_mtime if error_file.exists() else ended
        error = describe_error(error_file, logs, traceback=code not in EXPLAINED) if code not in CLEAN_EXITS else ""
        if not error_file.exists() and (entered := read_phase(self._place.state_dir, rank)):
            error = ("\n" if "\n" in error else "; ").join([f"in phase {entered[0]}", error])
        return RankExit(rank=rank, code=code, at=at, error=error, asked=self._asked)

    def raised(self) -> tuple[int, float] | None:
        """Return the rank that recorded an exception first, and when (seconds since 1970). None if none has.

        Its process can run on for seconds. Meanwhile its connections close, and ranks of other pods fail because of it.
        """
        recorded = []
        for rank in self._place.ranks:
            with contextlib.suppress(FileNotFoundError):
                recorded.append((self._error_file(rank).stat().st_mtime, rank))
        return min(recorded)[::-1] if recorded else None

    def _error_file(self, rank: int) -> Path:
        return self._log_dir / f"rank-{rank}.error.json"

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the ranks, which save after their step. Not to their children: the ranks still need them."""
        self._asked = True
        for process in self._popen.values():
            process.send_signal(signal.SIGTERM)

    async def stop(self, grace: float) -> None:
        """Stop all ranks: SIGTERM, then SIGKILL after `grace` seconds. Kills what they left and flushes the logs."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._stop, grace)

    def _stop(self, grace: float) -> None:
        self._signal(signal.SIGTERM, [process for process in self._popen.values() if process.poll() is None])
        self._await(grace)
        self._signal(signal.SIGKILL, self._popen.values())
        self._await(KILL_SECONDS)
        self._copies.finish()

    def _signal(self, number: int, processes: Iterable[Popen[bytes]]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # neither it nor a child of it is left
                os.killpg(process.pid, number)

    def _await(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._popen.values():
            with contextlib.suppress(TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


def added_variables(place: Place, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank has besides those of its pod, `environ`.

    Without PYTHONHASHSEED, sets of strings have another order in each rank and each attempt, and tasks that pick from
    them (five of reasoning-gym's, users' code) would make other problems there.
    """
    seed = environ.get("PYTHONHASHSEED") or str(place.contract.config.training.seed)
    return {**place.rank_env(local_rank), "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": seed}
