"""The rank processes of one pod: starts, signals and stops them together.

Not by torch's elastic agent, which needs the same number of ranks on every node, nor by the layer below it: to import
torch would take longer than all else that a launcher does before its ranks begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from grpo_workload.launcher.place import Place
from grpo_workload.launcher.rank_exits import CLEAN_EXITS, EXPLAINED, RankExit, describe_error
from grpo_workload.launcher.rank_logs import LogCopies
from grpo_workload.ranks.environment import ENV_WAITS
from grpo_workload.reporting.progress_files import read_phase
from grpo_workload.reporting.start_log import machine_seconds

SETTLE_SECONDS = 0.5  # time within which ranks that share a collective fail together
KILL_SECONDS = 30  # for the kernel to end a killed process: it may wait for a device


def log_dir_of(place: Place) -> Path:
    """Return the folder of the logs of a pod's ranks."""
    return place.state_dir / "logs"


class Ranks:
    """The running ranks. Blocking calls run in its own threads, so that the event loop can always answer peers."""

    def __init__(self, place: Place) -> None:
        """Prepare for the ranks of this pod; `start` starts them."""
        self._place, self._copies, self._log_dir = place, LogCopies(), log_dir_of(place)
        self._popen: dict[int, Popen[bytes]] = {}  # by local rank
        self._variables: dict[int, dict[str, str]] = {}  # by local rank
        self._asked = False
        self._threads = ThreadPoolExecutor(max_workers=place.member.gpus + 1, thread_name_prefix="ranks")

    @classmethod
    def start(cls, place: Place, command: Sequence[str], *, ahead: bool = False) -> Ranks:
        """Start one process per rank with torchrun's variables, each in a session of its own.

        Output goes to files in the state folder and, prefixed with the rank, to stdout and stderr. Raises OSError if
        one cannot be started; those before it are killed.

        Args:
            place: the pod.
            command: what a rank runs.
            ahead: whether they load their programs alone, and wait for `begin`.
        """
        ranks = cls(place)
        ranks._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for local_rank in range(len(place.ranks)):
                ranks._start(local_rank, command, ahead=ahead)
        except BaseException:
            ranks._stop(grace=0)
            raise
        return ranks

    def begin(self, place: Place) -> bool:
        """Let ranks that were started ahead do their part of an attempt, whose contract they read now.

        Returns False where one has ended, or they were started with other variables than this attempt's have.
        """
        needed = {local_rank: added_variables(place, local_rank, os.environ) for local_rank in range(len(place.ranks))}
        if needed != self._variables or any(process.poll() is not None for process in self._popen.values()):
            return False
        self._place = place
        for rank in place.ranks:
            self._error_file(rank).unlink(missing_ok=True)
        for process in self._popen.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as begins:  # it has ended just now: its end counts
                begins.write(f"{machine_seconds()}\n".encode())
        return True

    def _start(self, local_rank: int, command: Sequence[str], *, ahead: bool) -> None:
        rank = self._place.ranks[local_rank]
        error = self._error_file(rank)
        error.unlink(missing_ok=True)
        self._variables[local_rank] = added = added_variables(self._place, local_rank, os.environ)
        variables = added | {"TORCHELASTIC_ERROR_FILE": str(error)} | ({ENV_WAITS: "1"} if ahead else {})
        out, err = (self._log_dir / f"rank-{rank}.{kind}.log" for kind in ("stdout", "stderr"))
        with out.open("w") as stdout, err.open("w") as stderr:
            self._popen[local_rank] = Popen(
                list(command),
                env=os.environ | variables,
                stdin=PIPE if ahead else None,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
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
