"""The fence: only the newest attempt of a job may write into its run's folder.

    <data folder>/<run>/fence/attempt-N    {"attempt": N, "podUid": ..., "at": ...}, written once and never changed

When a node loses its network, its pods keep running while the next attempt starts elsewhere, and nobody can stop the
old ranks. So they stop themselves: rank 0 takes the fence for its attempt before it writes anything, and checks it
before it publishes or deletes a checkpoint and at the end of each step. Both attempts see the same storage.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpo_workload.storage.files import sync

_PREFIX = "attempt-"


class SupersededError(RuntimeError):
    """Another pod or a newer attempt has taken the place of this attempt, which must not write any more."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of a run, taken for one attempt by the pod of rank 0."""

    folder: Path
    attempt: int
    pod_uid: str

    @classmethod
    def take(cls, run_dir: Path, attempt: int, pod_uid: str) -> Fence:
        """Take the fence for `attempt`; the pod that already holds it may take it again.

        Raises:
            SupersededError: another pod holds the attempt, or a newer attempt holds the fence; says which one, and
                what happens next.
            OSError: the volume is full, read-only, or not this user's; it is the first thing that a run writes.
        """
        fence = cls(run_dir / "fence", attempt, pod_uid)
        try:
            fence._take()
        except OSError as error:
            said = f"cannot write to the run's folder as user {os.getuid()}: {error.strerror}"
            raise OSError(error.errno, said, str(error.filename or run_dir)) from error
        fence.check()  # a newer attempt may have taken it in between
        return fence

    def _take(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.check()
        path = self.folder / f"{_PREFIX}{self.attempt}"
        try:
            # O_EXCL: of two pods that arrive at once only one creates the file, on NFS as on a local disk.
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            holder = _holder(path)
            if holder != self.pod_uid:
                raise SupersededError(
                    f"attempt {self.attempt} of this job is held by pod uid {holder}, and this is pod uid "
                    f"{self.pod_uid}: one replaced the other. Nothing was published; the operator continues the job "
                    f"with attempt {self.attempt + 1}"
                ) from None
        else:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"attempt": self.attempt, "podUid": self.pod_uid, "at": now}
            with os.fdopen(descriptor, "w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            sync(self.folder)

    def check(self) -> None:
        """Raise SupersededError if a newer attempt has taken the fence."""
        # An NFS client may list a folder from its cache. After the folder has changed it asks the server, and touching
        # the folder is a change that needs no space.
        os.utime(self.folder)
        attempts = (int(path.name.removeprefix(_PREFIX)) for path in self.folder.glob(f"{_PREFIX}*"))
        newest = max(attempts, default=self.attempt)
        if newest > self.attempt:
            holder = _holder(self.folder / f"{_PREFIX}{newest}")
            raise SupersededError(
                f"attempt {self.attempt} of this job was superseded by attempt {newest}, held by pod uid {holder}; "
                "nothing was published"
            )


def _holder(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["podUid"])
    except json.JSONDecodeError:
        return "unknown (it was killed while it took the fence)"
