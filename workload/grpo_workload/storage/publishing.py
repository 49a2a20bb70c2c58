"""Publish a folder that all ranks have written: a checkpoint or an export counts once it has its name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_workload.ranks.collectives import gather, on_main
from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_folder import CheckpointFolder, checkpoints
from grpo_workload.storage.files import StorageError
from grpo_workload.storage.manifest import write_manifest
from grpo_workload.storage.writer import CheckpointWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A folder that ranks write, and that has no name yet."""

    folder: CheckpointFolder  # where it is published
    scratch: Path  # what `folder.begin` returned
    writer: CheckpointWriter  # this rank's
    size: int  # estimated bytes, for messages
    best: int | None = None  # the step whose folder stays, however old it is
    background: Background | None = None  # deletes what this one replaces

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part, or failed to."""
        return self.writer.is_done

    def publish(self) -> Path:
        """Wait until all ranks have written, give it its name, and delete what it replaces; collective.

        Raises:
            SupersededError: a newer attempt has taken over the run.
            StorageError: a rank could not write its files; what was published before is unchanged.
        """
        self.writer.wait()
        written = gather((self.writer.entries, self.writer.failure))
        failure = next((failure for _, failure in written if failure is not None), None)

        def finish() -> Path:
            folder = self.folder
            try:
                folder.check()  # if a newer attempt has removed the files, that is the error to report
                if failure is not None:
                    raise OSError(failure)
                write_manifest(self.scratch, {name: entry for entries, _ in written for name, entry in entries.items()})
                published = folder.publish(self.scratch)
            except OSError as error:
                newest = next(iter(checkpoints(folder.folder)), None)
                message = full_message(error, self.scratch, self.size, newest)  # before `abandon` frees space
                folder.abandon(self.scratch)
                raise StorageError(message) from error
            folder.prune(best=self.best, thread=self.background.thread if self.background else None)
            return published

        return on_main(finish)


def full_message(error: OSError, scratch: Path, size: int, newest: Path | None) -> str:
    """Say that a checkpoint could not be written: where, why, how much space it needs, and what to do."""
    free = shutil.disk_usage(scratch.parent).free
    kept = f"the last good checkpoint is {newest}" if newest else "there is no earlier checkpoint"
    return (
        f"storage.claimName: the checkpoint could not be written to {scratch}: {error}. It needs about {size:,} "
        f"bytes; in addition to the part already written, {free:,} are free; {kept}. Use a larger volume, or a smaller "
        "storage.keep"
    )
