"""Write one rank's files of a checkpoint, at once or in a thread from copies, and report why it failed.

DeepSpeed's ranks meet in barriers while they save: if one raised there, the others would hang. So a failure is kept
until all ranks have written, and then they all fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_workload.storage.background import Background
from grpo_workload.storage.files import READABLE
from grpo_workload.storage.manifest import Entry, seal
from grpo_workload.storage.model_files import ModelFiles
from grpo_workload.storage.staging import num_bytes_of
from grpo_workload.weights.export import Export


class CheckpointWriter(TorchCheckpointEngine):  # type: ignore[misc]  # deepspeed is untyped
    """torch.save for DeepSpeed; each file is on the disk and described when `wait` returns. `guard` keeps failures."""

    def __init__(self, folder: Path, background: Background | None = None) -> None:
        """Write into `folder`: copies in `background`, or without it each file before the call returns."""
        super().__init__()
        self._folder, self._background = folder, background
        self._begun: list[Future[None]] = []
        self.entries: dict[str, Entry] = {}  # files written so far, by path relative to the folder
        self.failure: str | None = None
        self.seconds = 0.0  # spent on writing

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder; DeepSpeed calls this."""

        def make() -> list[Path]:
            if Path(path) != self._folder:  # it exists, unless a newer attempt has removed it
                Path(path).mkdir(exist_ok=exist_ok)
            return []

        self.guard(Path(path), make)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; DeepSpeed calls this."""
        self.guard(Path(path), partial(self._write, self.copy(state_dict), Path(path)))

    def copy(self, state: Any) -> Any:
        """Return what may be written later: in the background a copy of `state`, else `state` itself."""
        return self._background.staging.copy(state) if self._background else state

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host. DeepSpeed's weights may be views of one buffer, which safetensors refuses."""
        return self._background.staging.values(tensor) if self._background else tensor.to("cpu", copy=True)

    def guard(self, path: Path, write: Callable[[], Iterable[Path]], *, at_once: bool = False) -> None:
        """Run `write`, which makes `path` and returns the files that it wrote. After a failure, this does nothing.

        In the background, it runs after what was given before, unless `at_once`.
        """
        if self._background and not at_once:
            self._begun.append(self._background.thread.submit(self._run, path, write))
        else:
            self._run(path, write)

    def write_weights(self, folder: Path, weights: Export, save_rest: Callable[[Path], None]) -> None:
        """Write a model's weights into `folder`, each rank its files of them, and what rank 0 adds by `save_rest`.

        Collective under ZeRO-3. In the background, a rank copies what it writes; else it holds a tensor at a time.
        """
        files = own_files(weights)
        self.makedirs(str(folder), exist_ok=True)
        wrap = self._background.file if self._background else lambda file: file
        for name, tensor in weights:  # to the end also after a failure, since others gather with this rank
            if name in files:
                values = self._background.staging.values(tensor) if self._background else tensor
                self.guard(folder / files.file(name), partial(_put, files, folder, name, values, wrap))
        self.guard(folder, partial(files.close, folder))
        if dist.get_rank() == 0:
            self.add(folder, save_rest)

    def add(self, folder: Path, save: Callable[[Path], None], *, at_once: bool = False) -> None:
        """Write what `save` adds to a folder, into which other ranks may write a model's weights; as `guard`."""

        def write() -> list[Path]:
            before = set(folder.rglob("*"))
            save(folder)
            new = (path for path in folder.rglob("*") if path.is_file() and path not in before)
            added = [path for path in new if not path.match("model*.safetensors")]
            for path in added:  # safetensors lets only the owner read
                path.chmod(READABLE)
            return added

        self.guard(folder, write, at_once=at_once)

    @property
    def is_done(self) -> bool:
        """Whether all has been written, or cannot be."""
        return all(future.done() for future in self._begun)

    def wait(self) -> None:
        """Wait until `is_done`, and drop the copies."""
        while self._begun:
            self._begun.pop(0).result()

    def _run(self, path: Path, write: Callable[[], Iterable[Path]]) -> None:
        if self.failure is not None or (self._background and self._background.has_ended):
            return
        start = time.perf_counter()
        try:
            for file in write():
                self.entries[str(file.relative_to(self._folder))] = seal(file)
        except (OSError, RuntimeError, SafetensorError) as error:
            # While it handles the file's error, torch raises another one about its position in the file.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            self.failure = f"{path}: {cause}"
        self.seconds += time.perf_counter() - start

    def _write(self, state_dict: Any, path: Path) -> list[Path]:
        # Opened here, since torch does not report what went wrong with a file that it opens itself.
        with open(path, "wb") as file:
            torch.save(state_dict, self._background.file(file) if self._background else file)
        return [path]


def own_files(weights: Export) -> ModelFiles:
    """Return the files of a model that this rank writes."""
    return ModelFiles(weights.specs, rank=dist.get_rank(), world_size=dist.get_world_size())


def _put(files: ModelFiles, folder: Path, name: str, tensor: Tensor, wrap: Callable[[Any], Any]) -> list[Path]:
    files.put(folder, name, tensor, wrap)
    return []


class Measure(TorchCheckpointEngine):  # type: ignore[misc]  # deepspeed is untyped
    """Adds up what a rank would copy for DeepSpeed's files, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0  # bytes

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing; DeepSpeed calls this."""

    def save(self, state_dict: Any, path: str) -> None:
        """Count one file; DeepSpeed calls this."""
        self.size += num_bytes_of(state_dict)


def save_deepspeed(deepspeed_engine: Any, engine: TorchCheckpointEngine, folder: Path, tag: str) -> None:
    """Let a DeepSpeedEngine save by `engine` into the folder `tag` of `folder`; collective."""
    deepspeed_engine.checkpoint_engine = engine
    # Rank 0 would copy a script that extracts weights, bypassing `engine`; model/ makes it unnecessary.
    deepspeed_engine._copy_recovery_script = lambda folder: None
    frozen = frozen_names(deepspeed_engine.module)
    # DeepSpeed omits a frozen weight under one of its names only: a tied one would be written under the other.
    deepspeed_engine.module_state_dict = lambda **options: {
        name: value
        for name, value in type(deepspeed_engine).module_state_dict(deepspeed_engine, **options).items()
        if name not in frozen
    }
    deepspeed_engine.save_checkpoint(str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=True)


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
