"""Write one rank's files of a checkpoint, and report why it failed.

DeepSpeed's ranks meet in barriers while they save: if one raised there, the others would hang. So a failure is kept
until all ranks have written, and then they all fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_workload.ranks.collectives import gather, on_main
from grpo_workload.storage.checkpoint_folder import CheckpointFolder, checkpoints
from grpo_workload.storage.files import make_readable
from grpo_workload.storage.manifest import Entry, seal, write_manifest


class StorageError(RuntimeError):
    """The storage cannot hold what has to be written."""


class CheckpointWriter(TorchCheckpointEngine):  # type: ignore[misc]  # deepspeed is untyped
    """torch.save for DeepSpeed; each file is on the disk and described when a call returns. `guard` keeps failures."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.entries: dict[str, Entry] = {}  # files written so far, by path relative to the folder
        self.failure: str | None = None

    def save_deepspeed(self, deepspeed_engine: Any, tag: str) -> None:
        """Let a DeepSpeedEngine save into the folder `tag`; collective."""
        deepspeed_engine.checkpoint_engine = self
        # Rank 0 would copy a script that extracts weights, bypassing this class; model/ makes it unnecessary.
        deepspeed_engine._copy_recovery_script = lambda folder: None
        frozen = frozen_names(deepspeed_engine.module)
        # DeepSpeed omits a frozen weight under one of its names only: a tied one would be written under the other.
        deepspeed_engine.module_state_dict = lambda **options: {
            name: value
            for name, value in type(deepspeed_engine).module_state_dict(deepspeed_engine, **options).items()
            if name not in frozen
        }
        deepspeed_engine.save_checkpoint(str(self._folder), tag=tag, save_latest=False, exclude_frozen_parameters=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder; DeepSpeed calls this."""

        def make() -> list[Path]:
            os.makedirs(path, exist_ok=exist_ok)
            return []

        self.guard(Path(path), make)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; DeepSpeed calls this."""

        def write() -> list[Path]:
            # Opened here, since torch does not report what went wrong with a file that it opens itself.
            with open(path, "wb") as file:
                torch.save(state_dict, file)
            return [Path(path)]

        self.guard(Path(path), write)

    def guard(self, path: Path, write: Callable[[], Iterable[Path]]) -> None:
        """Run `write`, which makes `path` and returns the files that it wrote. After a failure, this does nothing."""
        if self.failure is not None:
            return
        try:
            for file in write():
                self.entries[str(file.relative_to(self._folder))] = seal(file)
        except (OSError, RuntimeError, SafetensorError) as error:
            # While it handles the file's error, torch raises another one about its position in the file.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            self.failure = f"{path}: {cause}"


def write_model(folder: Path, write: Callable[[], None], processing_class: Any, card: str) -> list[Path]:
    """Write a model by `write`, its tokenizer or processor and, unless it is empty, its card; return all files."""
    write()
    processing_class.save_pretrained(folder)
    if card:
        (folder / "README.md").write_text(card)
    make_readable(folder)
    return list(folder.iterdir())


def publish(
    folder: CheckpointFolder, scratch: Path, writer: CheckpointWriter, size: int, *, best: int | None = None
) -> Path:
    """Give what the writers of all ranks wrote into `scratch` its name, and delete what it replaces; collective.

    Args:
        folder: where it is published.
        scratch: a folder that `folder.begin` returned.
        writer: this rank's.
        size: estimated bytes, for messages.
        best: the step whose folder stays, however old it is.

    Raises:
        SupersededError: a newer attempt has taken over the run.
        StorageError: a rank could not write its files; what was published before is unchanged.
    """
    written = gather((writer.entries, writer.failure))
    failure = next((failure for _, failure in written if failure is not None), None)

    def finish() -> Path:
        try:
            folder.check()  # if a newer attempt has removed the files, that is the error to report
            if failure is not None:
                raise OSError(failure)
            write_manifest(scratch, {name: entry for entries, _ in written for name, entry in entries.items()})
            published = folder.publish(scratch)
        except OSError as error:
            newest = next(iter(checkpoints(folder.folder)), None)
            message = full_message(error, scratch, size, newest)  # before `abandon` frees space
            folder.abandon(scratch)
            raise StorageError(message) from error
        folder.prune(best=best)
        return published

    return on_main(finish)


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained; a tied parameter has several."""
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def load_trained(src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """Load into a module what `CheckpointWriter` wrote of it: all but frozen weights, which are the base model's."""
    missing, unexpected = dst.load_state_dict(src, strict=False)
    lacking = set(missing) - frozen_names(dst)
    assert not lacking, f"the checkpoint lacks {lacking}"
    assert not unexpected, f"the model lacks {unexpected}"


def num_bytes(module: nn.Module) -> int:
    """Estimate the size of a checkpoint in bytes: trained weights twice (for from_pretrained and for DeepSpeed), and in
    float32 the master weights and two moments.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return sum(getattr(p, "ds_numel", p.numel()) * (2 * p.element_size() + 12) for p in trained)


def full_message(error: OSError, scratch: Path, size: int, newest: Path | None) -> str:
    """Say that a checkpoint could not be written: where, why, how much space it needs, and what to do."""
    free = shutil.disk_usage(scratch.parent).free
    kept = f"the last good checkpoint is {newest}" if newest else "there is no earlier checkpoint"
    return (
        f"storage.claimName: the checkpoint could not be written to {scratch}: {error}. It needs about {size:,} "
        f"bytes; in addition to the part already written, {free:,} are free; {kept}. Use a larger volume, or a smaller "
        "storage.keep"
    )
