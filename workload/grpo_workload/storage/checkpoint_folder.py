"""The folder of a run's checkpoints: publishing a checkpoint whole, their order, and deleting old ones.

    <data folder>/<run>/checkpoints/step-N/            a whole checkpoint; it gets this name once it is on the disk
                                    universal-step-N/  its optimizer state for other numbers of ranks or ZeRO stages
                                    damaged-step-N/    found damaged when the run resumed from an older checkpoint
                                    .attempt-A-<name>/ being written by attempt A
                                    .discarded-*/      being deleted

Steps are in the order of training: damaged newer checkpoints are set aside before a run resumes from an older one.
Folders that are being written have their attempt in their name, so two attempts never write the same file. An attempt
that starts removes what older attempts have not finished, so an old attempt cannot publish even if it checked the fence
just before that.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path

from grpo_workload.storage.fence import Fence
from grpo_workload.storage.files import sync

_STEP, _UNIVERSAL, _DAMAGED = "step-", "universal-step-", "damaged-step-"
_SCRATCH, _DISCARDED = ".attempt-", ".discarded-"


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted(folder.glob(f"{_STEP}*"), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix(_STEP))


class CheckpointFolder:
    """The checkpoints of one run, as rank 0 of the attempt that holds `fence` changes them."""

    def __init__(self, folder: Path, *, keep: int, fence: Fence) -> None:
        """Create `folder`, and remove what older attempts have not finished. The `keep` newest checkpoints stay."""
        self.folder = folder
        self._keep = keep
        self.fence = fence
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{_SCRATCH}*"):
            self._remove(path)
        _delete(folder.glob(f"{_DISCARDED}*"))

    def check(self) -> None:
        """Raise SupersededError if a newer attempt has taken over."""
        self.fence.check()

    def begin(self, name: str) -> Path:
        """Return an empty folder for writing what is later published as `name`.

        Raises SupersededError if a newer attempt has taken over.
        """
        self.fence.check()
        scratch = self.folder / f"{_SCRATCH}{self.fence.attempt}-{name}"
        scratch.mkdir()
        return scratch

    def abandon(self, scratch: Path) -> None:
        """Remove a folder that `begin` returned, with its content."""
        self._remove(scratch)

    def publish(self, scratch: Path) -> Path:
        """Rename `scratch`, whose files are on the disk, to its final name, and return that.

        Raises SupersededError if a newer attempt has taken over.
        """
        for path in [*scratch.rglob("*"), scratch]:
            if path.is_dir():
                sync(path)
        self.fence.check()
        target = self.folder / scratch.name.removeprefix(f"{_SCRATCH}{self.fence.attempt}-")
        scratch.rename(target)
        sync(self.folder)
        return target

    def prune(self, *, best: int | None = None, thread: Executor | None = None) -> None:
        """Delete what newer checkpoints replace, but for that of step `best`; with `thread`, their files later in it.

        Raises SupersededError if a newer attempt has taken over.

        Call it after publishing a checkpoint: the one that the run resumed from stays until there is a newer one.
        """
        self.fence.check()
        newest, *_ = published = checkpoints(self.folder)
        replaced = [
            *(path for path in published[self._keep :] if step_of(path) != best),
            *(path for path in self.folder.glob(f"{_UNIVERSAL}*") if path != self.universal(newest)),
            *self.folder.glob(f"{_DAMAGED}*"),
        ]
        discarded = [*self.folder.glob(f"{_DISCARDED}*"), *map(self._discard, replaced)]
        if thread:
            thread.submit(_delete, discarded)
        else:
            _delete(discarded)

    def set_aside(self, checkpoint: Path) -> None:
        """Rename a damaged checkpoint so that it no longer counts; `prune` deletes it after the next is published."""
        self.fence.check()
        target = self.folder / f"{_DAMAGED}{step_of(checkpoint)}"
        self._remove(target)
        checkpoint.rename(target)

    def replace(self, target: Path) -> None:
        """Remove `target`, if it exists, so that a replacement can be published."""
        self.fence.check()
        self._remove(target)

    def universal(self, checkpoint: Path) -> Path:
        """Return the path for the converted optimizer state of a checkpoint of this run or of the one it continues."""
        return self.folder / f"{_UNIVERSAL}{step_of(checkpoint)}"

    def _remove(self, path: Path) -> None:
        if path.exists():
            _delete([self._discard(path)])

    def _discard(self, path: Path) -> Path:
        # Renamed before it is deleted, so that a half-deleted checkpoint is not taken for a whole one.
        return path.rename(path.with_name(f"{_DISCARDED}{time.time_ns()}-{path.name.lstrip('.')}"))


def _delete(folders: Iterable[Path]) -> None:
    for path in folders:
        # A file that another client holds open cannot be deleted yet; the next prune or attempt deletes it.
        shutil.rmtree(path, ignore_errors=True)
