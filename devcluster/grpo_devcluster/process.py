"""Supervision of long-running programs: start one once, find it again in a later call, end it reliably."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_devcluster.progress import wait_until

# Programs that this process started, to reap them when they end.
_children: dict[int, subprocess.Popen[bytes]] = {}


def started_at(pid: int) -> str | None:
    """Return the start time of a living process in clock ticks, or None; a zombie does not count as living."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name may contain spaces and parentheses; the fields follow the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]


@dataclass(frozen=True)
class Daemon:
    """One program with its log and its pid file, which also holds the start time because pids are reused."""

    name: str
    command: Sequence[str]
    state: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    # False: the program dies with the thread that started it, so that a killed test run leaves no process.
    detached: bool = True

    @property
    def pid_file(self) -> Path:
        return self.state / "run" / f"{self.name}.pid"

    @property
    def log(self) -> Path:
        return self.state / "logs" / f"{self.name}.log"

    def pid(self) -> int | None:
        """Return the process id, or None if the program does not run."""
        try:
            pid, start = self.pid_file.read_text().split()
        except FileNotFoundError:
            return None
        if int(pid) in _children:
            _children[int(pid)].poll()
        return int(pid) if started_at(int(pid)) == start else None

    def start(self) -> None:
        """Start the program unless it runs."""
        if self.pid() is not None:
            return
        self.pid_file.parent.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = list(self.command) if self.detached else ["setpriv", "--pdeathsig", "KILL", *self.command]
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                cwd=self.state,
                start_new_session=True,
            )
        _children[child.pid] = child
        self.pid_file.write_text(f"{child.pid} {started_at(child.pid)}")

    def stop(self, grace: float = 5.0) -> None:
        """End the program: SIGTERM, and SIGKILL after `grace` seconds."""
        pid = self.pid()
        if pid is not None:
            for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                if self._ended_within(patience):
                    break
        self.pid_file.unlink(missing_ok=True)
        if pid in _children:
            _children.pop(pid).wait()

    def require(self) -> None:
        """Raise a RuntimeError with the end of the log if the program has ended."""
        if self.pid() is None:
            lines = self.log.read_text(errors="replace").splitlines()[-15:] if self.log.exists() else []
            raise RuntimeError("\n".join([f"{self.name} has ended; the end of {self.log}:", *lines]))

    def _ended_within(self, seconds: float) -> bool:
        try:
            wait_until(lambda: self.pid() is None, f"end of {self.name}", seconds, interval=0.02)
        except TimeoutError:
            return False
        return True


def kill_all(pids: Sequence[int], timeout: float = 10.0) -> None:
    """SIGKILL processes that no Daemon stands for (containers and their shims), and wait for their end."""
    starts = {pid: started_at(pid) for pid in pids}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if starts[pid] is not None and started_at(pid) == starts[pid]]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} survived SIGKILL for {timeout:.0f} s")
        time.sleep(0.02)
