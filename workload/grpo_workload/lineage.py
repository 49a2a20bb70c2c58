"""The folder of a run's checkpoints: how one comes into being whole, in which order they are, and when they go.

    <data folder>/<run>/checkpoints/step-N/            a checkpoint, whole: it gets this name when all of it is on the disk
                                    universal-step-N/  the same optimizer state for other ranks or stages, made when it was needed
                                    damaged-step-N/    was found damaged when an older one was resumed from
                                    .epoch-E-<name>/   being written by epoch E
                                    .discarded-*/      being deleted

Steps are in the order of training: a newer checkpoint is set aside before a run goes on from an older one. What is being written is named
after its epoch, so that two epochs never write the same file; an epoch that starts takes away what older ones have begun, so that even one
that looked at the claims just before cannot publish.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from grpo_workload.claim import Claim
from grpo_workload.files import sync

_STEP, _UNIVERSAL, _DAMAGED = "step-", "universal-step-", "damaged-step-"
_SCRATCH, _DISCARDED = ".epoch-", ".discarded-"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted(folder.glob(f"{_STEP}*"), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps after which it was saved."""
    return int(checkpoint.name.removeprefix(_STEP))


class Lineage:
    """The checkpoints of one run, to be changed by the epoch that holds `claim`; on rank 0 alone."""

    def __init__(self, folder: Path, *, keep: int, claim: Claim) -> None:
        """`folder` is made; what older epochs have left unfinished in it is removed. The `keep` newest checkpoints stay."""
        self.folder = folder
        self._keep = keep
        self._claim = claim
        folder.mkdir(parents=True, exist_ok=True)
        for path in [*folder.glob(f"{_SCRATCH}*"), *folder.glob(f"{_DISCARDED}*")]:
            self._discard(path)

    def check(self) -> None:
        """Raise SupersededError when another epoch has taken over."""
        self._claim.check()

    def begin(self, name: str) -> Path:
        """An empty folder in which what is to be published as `name` is written; SupersededError when another epoch has taken over."""
        self._claim.check()
        scratch = self.folder / f"{_SCRATCH}{self._claim.epoch}-{name}"
        scratch.mkdir()
        return scratch

    def abandon(self, scratch: Path) -> None:
        """Remove a folder that `begin` has given, whatever is in it."""
        self._discard(scratch)

    def publish(self, scratch: Path) -> Path:
        """Give what is in `scratch`, whose files are on the disk, its name; SupersededError when another epoch has taken over."""
        for path in [*scratch.rglob("*"), scratch]:
            if path.is_dir():
                sync(path)
        self._claim.check()
        target = self.folder / scratch.name.removeprefix(f"{_SCRATCH}{self._claim.epoch}-")
        scratch.rename(target)
        sync(self.folder)
        return target

    def prune(self) -> None:
        """Delete what newer checkpoints have made needless; SupersededError when another epoch has taken over.

        To be called after a checkpoint was published, so that the one the run was resumed from stays until there is a newer one.
        """
        self._claim.check()
        newest, *_ = published = checkpoints(self.folder)
        universal = [path for path in self.folder.glob(f"{_UNIVERSAL}*") if path != self.universal(newest)]
        for path in [*published[self._keep :], *universal, *self.folder.glob(f"{_DAMAGED}*"), *self.folder.glob(f"{_DISCARDED}*")]:
            self._discard(path)

    def set_aside(self, checkpoint: Path) -> None:
        """Take a damaged checkpoint out of the lineage; it is deleted when the next one was published."""
        self._claim.check()
        target = self.folder / f"{_DAMAGED}{step_of(checkpoint)}"
        self._discard(target)
        checkpoint.rename(target)

    def replace(self, target: Path) -> None:
        """Make way for what is published as `target`, if something damaged is there."""
        self._claim.check()
        self._discard(target)

    def universal(self, checkpoint: Path) -> Path:
        """Where the converted optimizer state of a checkpoint (of this run, or of the one it continues) is kept."""
        return self.folder / f"{_UNIVERSAL}{step_of(checkpoint)}"

    def _discard(self, path: Path) -> None:
        # Renamed first: a checkpoint that is deleted halfway must not look like one.
        if not path.exists():
            return
        if not path.name.startswith(_DISCARDED):
            path = path.rename(path.with_name(f"{_DISCARDED}{time.time_ns()}-{path.name.lstrip('.')}"))
        # A file that another client holds open cannot go yet; what is left goes with the next prune or epoch.
        shutil.rmtree(path, ignore_errors=True)
