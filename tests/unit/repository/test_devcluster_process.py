"""Supervision of the devcluster's programs: found again, ended reliably, reported with their log, never confused."""

import os
import signal
from pathlib import Path

import pytest

from grpo_devcluster.process import Daemon, kill_all, started_at
from grpo_devcluster.progress import wait_until


def daemon(tmp_path: Path, *command: str, detached: bool = True) -> Daemon:
    return Daemon("test", command, tmp_path, detached=detached)


@pytest.mark.parametrize("detached", [True, False])
def test_a_program_is_started_once_found_again_and_ended(tmp_path: Path, detached: bool) -> None:
    first = daemon(tmp_path, "sleep", "600", detached=detached)
    first.start()
    again = daemon(tmp_path, "sleep", "600", detached=detached)
    again.start()
    assert again.pid() == first.pid() is not None
    again.stop()
    assert first.pid() is None


def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = daemon(tmp_path, "sh", "-c", "trap '' TERM; echo set; while :; do sleep 0.1; done")
    stubborn.start()
    wait_until(lambda: "set" in stubborn.log.read_text(), "the trap is set", timeout=60)
    stubborn.stop(grace=0.2)
    assert stubborn.pid() is None


def test_a_pid_that_another_process_reuses_is_not_taken(tmp_path: Path) -> None:
    stale = daemon(tmp_path, "sleep", "600")
    stale.pid_file.parent.mkdir(parents=True)
    stale.pid_file.write_text(f"{os.getpid()} 1")
    assert stale.pid() is None
    stale.stop()
    assert started_at(os.getpid()) is not None


def test_an_ended_program_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = daemon(tmp_path, "sh", "-c", "echo no such flag; exit 1")
    broken.start()
    wait_until(lambda: broken.pid() is None, "its end", timeout=60)
    with pytest.raises(RuntimeError, match="no such flag"):
        broken.require()
    broken.stop()


def test_kill_all_returns_when_all_are_gone(tmp_path: Path) -> None:
    victim = daemon(tmp_path, "sleep", "600")
    victim.start()
    pid = victim.pid()
    assert pid is not None
    kill_all([pid])
    assert victim.pid() is None
    victim.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_a_wait_that_times_out_names_its_goal() -> None:
    with pytest.raises(TimeoutError, match="the impossible"):
        wait_until(lambda: False, "the impossible", timeout=0.05, interval=0.01)
