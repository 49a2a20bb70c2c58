"""How a rank writes its files of a checkpoint, and what it tells when it cannot.

DeepSpeed's ranks meet in barriers while they save: one that raised there would leave the others hanging. So a failure is kept until all
have written, and they fail together.
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

from grpo_workload.manifest import Entry, seal


class StorageError(RuntimeError):
    """The storage does not take what has to be written."""


class CheckpointWriter(TorchCheckpointEngine):  # type: ignore[misc]  # deepspeed is untyped
    """torch.save for DeepSpeed, with every file on the disk and described when it returns; see `attempt` for failures."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.entries: dict[str, Entry] = {}  # of the files written, by path relative to the folder
        self.failure: str | None = None

    def save_engine(self, engine: Any, tag: str) -> None:
        """Let a DeepSpeed engine save into the folder `tag`; collective."""
        engine.checkpoint_engine = self
        # It copies a script that extracts weights, which nobody needs beside model/, on rank 0 and past this class.
        engine._copy_recovery_script = lambda folder: None
        frozen = frozen_names(engine.module)
        # DeepSpeed leaves a frozen weight out under one of its names: a tied one would be written under the other.
        engine.module_state_dict = lambda **options: {
            name: value for name, value in type(engine).module_state_dict(engine, **options).items() if name not in frozen
        }
        engine.save_checkpoint(str(self._folder), tag=tag, save_latest=False, exclude_frozen_parameters=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, as DeepSpeed asks."""

        def make() -> list[Path]:
            os.makedirs(path, exist_ok=exist_ok)
            return []

        self.attempt(Path(path), make)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, as DeepSpeed asks."""

        def write() -> list[Path]:
            # Opened here: of a file that it opens itself, torch does not tell what went wrong with it.
            with open(path, "wb") as file:
                torch.save(state_dict, file)
            return [Path(path)]

        self.attempt(Path(path), write)

    def attempt(self, path: Path, write: Callable[[], Iterable[Path]]) -> None:
        """Run `write`, which makes `path` and returns the files that came of it; after a failure, keep it and do nothing more."""
        if self.failure is not None:
            return
        try:
            for file in write():
                self.entries[str(file.relative_to(self._folder))] = seal(file)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch raises an error about its own position in the file while it handles the one of the file.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            self.failure = f"{path}: {cause}"


def frozen_names(module: nn.Module) -> set[str]:
    """Names of the parameters that are not trained, tied ones under each of theirs."""
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def load_trained(src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """Load what `CheckpointWriter` wrote of a module into it: all but its frozen weights, which are the initial model's."""
    missing, unexpected = dst.load_state_dict(src, strict=False)
    lacking = set(missing) - frozen_names(dst)
    assert not lacking, f"the checkpoint lacks {lacking}"
    assert not unexpected, f"the model lacks {unexpected}"


def full_message(error: OSError, scratch: Path, num_bytes: int, newest: Path | None) -> str:
    """What is told of a checkpoint that could not be written: where, why, how much it takes, what there is, what to do."""
    free = shutil.disk_usage(scratch.parent).free
    kept = f"the last good one is {newest}" if newest else "there is none before it"
    return (
        f"storage.claimName: the checkpoint could not be written to {scratch}: {error}. It needs about {num_bytes:,} bytes; "
        f"beside what was written of it, {free:,} are free; {kept}. Use a larger volume, or a smaller storage.keep"
    )
