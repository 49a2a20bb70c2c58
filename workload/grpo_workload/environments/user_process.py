"""A process for users' code, which does not run in the rank: there it would have its credentials, memory and time.

The rank's side of what processes of rewards, tools and environments share; `user_worker` is the other side.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_workload.environments.endings import DYING_SECONDS, how_it_ended, last_stack
from grpo_workload.environments.sandbox import passed_environment

IMPORT_SECONDS = 300.0
"""Time for users' modules and factories."""
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from {module} import main
main({replies}, {stacks}, {parent})
"""


class UserProcess:
    """A process of its own group, with a socket to it, which ends with the rank."""

    def __init__(
        self,
        module: ModuleType,
        environ: Mapping[str, str],
        asked: Sequence[str] = (),
        *,
        field: str,
        memory_limit: str,
        ends_with_thread: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, which calls `main` of `module` with the arguments of `user_worker.enter`.

        Args:
            module: ours.
            environ: the rank's variables.
            asked: names of those that the user passes on besides what any program needs.
            field: the entry of the job, for messages.
            memory_limit: as the user wrote it, for messages.
            ends_with_thread: the kernel kills the process when the calling thread ends, even in the middle of a call.
                Otherwise it ends with the rank as soon as it is not in a call.
            variables: of ours, for names that are not passed on.

        Raises:
            ConfigError: a variable of `asked` is not set.
        """
        if missing := [name for name in asked if name not in environ]:
            raise ConfigError(
                f"{field}.env: {missing[0]} is not set in the pods that run it; set it in their podTemplate.env, or "
                "envFrom"
            )
        self._memory_limit = memory_limit
        passed = passed_environment(environ, asked)
        self.withheld = tuple(sorted(environ.keys() - passed.keys()))  # what the rank has and this process has not
        self.socket, theirs = socket.socketpair()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        parent = os.getpid() if ends_with_thread else None
        program = _PROGRAM.format(
            path=sys.path,
            module=module.__name__,
            replies=theirs.fileno(),
            stacks=self._stacks.fileno(),
            parent=parent,
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                env={**(variables or {}), **passed},
                pass_fds=(theirs.fileno(), self._stacks.fileno()),
                process_group=0,
            )

    def end(self) -> str:
        """Say how the process ended, after it has closed its socket."""
        with suppress(subprocess.TimeoutExpired):
            return how_it_ended(self.process.wait(DYING_SECONDS), self._memory_limit)
        return "closed its connection"

    def last_stack(self) -> str:
        """End the process, and return the stack of its main thread, to append to a message; empty if there is none."""
        if self._stacks.closed:
            return ""
        # On SIGABRT faulthandler writes the stack, even if the function holds Python's global lock (GIL).
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DYING_SECONDS)
        self._stacks.seek(0)
        dump = self._stacks.read(1 << 16)
        self.close()
        return last_stack(dump)

    def stop(self, seconds: float) -> None:
        """Close the socket, and give the process some seconds to end what it started; then `close`."""
        if self._stacks.closed:
            return
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.close()

    def close(self) -> None:
        """Kill the process and all processes that it started."""
        if self._stacks.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        self._stacks.close()


def not_sent(columns: Mapping[str, Any], other: str, whose: str, error: Exception) -> str:
    """Say which column cannot be sent to a process, and what to do.

    Args:
        columns: what was to be sent.
        other: named where each of them can be sent alone.
        whose: the process's owner: the reward's.
        error: what pickling them raised.
    """
    column = next((name for name in columns if not _pickles(columns[name])), other)
    return (
        f"column {column} cannot be sent to {whose} process ({type(error).__name__}: {error}); let dataset.preprocess "
        "remove it or turn it into text"
    )


def _pickles(value: Any) -> bool:
    """Whether a value can be sent to such a process."""
    try:
        pickle.dumps(value)
    except Exception:  # whatever the objects raise
        return False
    return True
