"""Asserts how the exits of a pod's ranks are summed up, and what error messages quote from ranks and their logs."""

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_spec.reports import ExitCode
from grpo_workload.launcher import rank_processes
from grpo_workload.launcher.rank_exits import RankExit, describe_error, result_of
from grpo_workload.launcher.rank_processes import Ranks, log_dir_of
from grpo_workload.reporting.start_log import machine_seconds
from support.trainer.places import place


def ended(rank: int, code: int, at: float = 0.0, asked: bool = False) -> RankExit:
    return RankExit(rank=rank, code=code, at=at, error="ValueError: boom", asked=asked)


@pytest.mark.parametrize(
    ("exits", "exit_code", "reason", "rank"),
    [
        ([ended(0, 0), ended(1, 0)], ExitCode.DONE, "Done", None),
        ([ended(0, 75), ended(1, 75)], ExitCode.STOPPED, "Stopped", None),
        ([ended(0, 0), ended(1, 75)], ExitCode.STOPPED, "Stopped", None),
        ([ended(0, 75), ended(1, 1)], ExitCode.RANK_FAILED, "RankFailed", 1),
        ([ended(0, 1, at=2), ended(1, 1, at=1)], ExitCode.RANK_FAILED, "RankFailed", 1),
        ([ended(0, 64, at=1), ended(1, -15, at=2)], ExitCode.CONFIG_ERROR, "ConfigError", 0),
        ([ended(0, 71), ended(1, 71)], ExitCode.RANK_FAILED, "NotFinite", 0),
        ([ended(0, 72, at=1), ended(1, -15, at=2)], ExitCode.RANK_FAILED, "WeightsDiffer", 0),
        ([ended(0, 1, at=2), ended(1, 73, at=1)], ExitCode.RANK_FAILED, "OutOfMemory", 1),
        ([ended(0, 74), ended(1, 74)], ExitCode.RANK_FAILED, "EnvironmentFailed", 0),
        ([ended(0, -15, asked=True)], ExitCode.STOPPED, "StoppedEarly", 0),
        ([ended(0, -15)], ExitCode.RANK_FAILED, "RankFailed", 0),
        ([ended(0, -9, asked=True)], ExitCode.RANK_FAILED, "RankFailed", 0),
    ],
)
def test_the_first_failure_decides(exits: list[RankExit], exit_code: ExitCode, reason: str, rank: int | None) -> None:
    result = result_of(exits)
    assert (result.exit_code, result.reason, result.rank) == (exit_code, reason, rank)


def test_ranks_that_had_started_are_killed_where_another_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(subprocess.Popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(rank_processes, "Popen", popen)
    two = next(pod for pod in ("job-a-0", "job-a-1") if len(place(tmp_path, pod).ranks) > 1)
    with pytest.raises(BlockingIOError):
        Ranks.start(place(tmp_path, two), [sys.executable, "-c", "import time; time.sleep(600)"])
    assert started[0].wait(30) < 0


def test_ranks_that_wait_begin_with_the_variables_that_they_have_and_with_no_others(tmp_path: Path) -> None:
    says = "import os, sys; line = sys.stdin.readline(); print(line, os.environ['MASTER_PORT'])"
    here = place(tmp_path, "job-a-0")
    moved = replace(here, contract=here.contract.model_copy(update={"master_port": 1234}))
    ranks = Ranks.start(here, [sys.executable, "-c", says], ahead=True)
    assert not ranks.begin(moved)
    (log_dir_of(here) / f"rank-{here.ranks[0]}.error.json").write_text("of a rank of the attempt before")
    assert ranks.begin(replace(here, contract=here.contract.model_copy(update={"attempt": 9})))
    assert ranks.raised() is None
    exits = asyncio.run(ranks.settle())
    asyncio.run(ranks.stop(grace=0))
    assert [one.code for one in exits] == [0] * len(here.ranks)
    assert not ranks.begin(here), "they have ended"
    began, port = (log_dir_of(here) / f"rank-{here.ranks[0]}.stdout.log").read_text().split()
    assert 0 < machine_seconds() - float(began) < 600
    assert int(port) == here.contract.master_port


def test_the_message_names_rank_exit_code_or_signal_and_error() -> None:
    assert result_of([ended(3, 1)]).message == "rank 3 failed with exit code 1: ValueError: boom"
    assert "rank 3 was killed by SIGKILL (probably out of memory" in result_of([ended(3, -signal.SIGKILL)]).message
    assert "rank 3 was killed by SIGSEGV" in result_of([ended(3, -signal.SIGSEGV)]).message


def test_a_recorded_exception_is_quoted_instead_of_the_log(tmp_path: Path) -> None:
    error, log = tmp_path / "error.json", tmp_path / "stderr.log"
    log.write_text("loading\nkilled here\n")
    traceback = "".join(f"line {number}\n" for number in range(100))
    more = {"py_callstack": traceback, "timestamp": "1"}
    error.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": more}}))

    lines = describe_error(error, [log]).splitlines()

    assert (lines[0], lines[1], lines[-1]) == ("ValueError: boom", "line 85", "line 99")


def test_without_an_exception_the_end_of_the_log_is_quoted(tmp_path: Path) -> None:
    error, log = tmp_path / "error.json", tmp_path / "stderr.log"
    log.write_text("loading\nkilled here\n")
    assert describe_error(error, [log]).endswith("loading\nkilled here")

    error.write_text('{"message": {"mess')
    assert describe_error(error, [log]).endswith("loading\nkilled here")

    log.write_text("")
    assert describe_error(error, [log]) == "it left no log"
