"""Which epoch of a job may write into its run's folder: the newest one that has claimed it.

    <data folder>/<run>/claims/epoch-N    {"epoch": N, "podUid": ..., "at": ...}, made once and never changed

A node that is cut off keeps its pods running, and the next epoch starts elsewhere: nobody can stop the old ranks but they themselves.
So rank 0 claims its epoch on the storage, which both see, before it writes anything else there, and looks at the claims before it publishes
or deletes a checkpoint and at the end of each step.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpo_workload.files import sync

_PREFIX = "epoch-"


class SupersededError(RuntimeError):
    """An epoch of the job must not write any more: another pod, or a newer epoch, has taken its place."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of an epoch, as the pod that holds rank 0 has taken it."""

    folder: Path
    epoch: int
    pod_uid: str

    @classmethod
    def take(cls, run_dir: Path, epoch: int, pod_uid: str) -> Claim:
        """Claim `epoch` of the run, or find that this very pod has done so before.

        Raises:
            SupersededError: another pod holds the epoch, or a newer epoch is claimed; says by whom, and what comes next.
        """
        claim = cls(run_dir / "claims", epoch, pod_uid)
        claim.folder.mkdir(parents=True, exist_ok=True)
        claim.check()
        path = claim.folder / f"{_PREFIX}{epoch}"
        try:
            # O_EXCL: of two pods that come at once one gets the file, on NFS as on a local disk.
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            holder = _holder(path)
            if holder != pod_uid:
                raise SupersededError(
                    f"epoch {epoch} of this job is claimed by pod uid {holder}, and this is pod uid {pod_uid}: one replaced the "
                    f"other. Nothing was published; the job goes on with epoch {epoch + 1}, which the operator starts"
                ) from None
        else:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"epoch": epoch, "podUid": pod_uid, "at": datetime.now(UTC).isoformat(timespec="seconds")}, file)
                file.flush()
                os.fsync(file.fileno())
            sync(claim.folder)
        claim.check()  # a newer epoch may have come between
        return claim

    def check(self) -> None:
        """Raise SupersededError when a newer epoch is claimed."""
        # An NFS client may list a folder from its cache; after a change of the folder it asks the server. This one takes no space.
        os.utime(self.folder)
        newest = max((int(path.name.removeprefix(_PREFIX)) for path in self.folder.glob(f"{_PREFIX}*")), default=self.epoch)
        if newest > self.epoch:
            holder = _holder(self.folder / f"{_PREFIX}{newest}")
            raise SupersededError(
                f"epoch {self.epoch} of this job was superseded by epoch {newest}, claimed by pod uid {holder}; nothing was published"
            )


def _holder(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["podUid"])
    except json.JSONDecodeError:
        return "unknown (it was ended while it claimed)"
