"""The ends of a pod's ranks: what they are taken together, and what is quoted from exceptions and logs."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode

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
