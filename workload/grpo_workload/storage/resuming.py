"""Choose the checkpoint that a run resumes from, convert its optimizer state if need be, and load it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.serialization import config

from grpo_spec.errors import ConfigError
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather, on_main
from grpo_workload.storage.checkpoint_content import DEEPSPEED, MODEL, REFERENCE, STATE, SavedState
from grpo_workload.storage.checkpoint_folder import CheckpointFolder, checkpoints
from grpo_workload.storage.files import StorageError
from grpo_workload.storage.manifest import faults, read_manifest
from grpo_workload.storage.writer import load_trained
from grpo_workload.storage.zero_conversion import Conversion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint to resume from."""

    checkpoint: Path
    state: SavedState
    folder: Path  # optimizer state that this number of ranks and this ZeRO stage can load
    is_universal: bool
    is_own: bool  # of this run, and not of the one that storage.resumeFrom names

    @property
    def reference(self) -> Path | None:
        """The reference model, if it had followed the policy (`training.syncRefModel`)."""
        folder = self.checkpoint / REFERENCE
        return folder if folder.is_dir() else None

    def load(self, policy: Policy) -> None:
        """Load the saved state into `policy`, which was built with `load_universal=is_universal`; collective."""
        # Files are mapped where all goes to a GPU: it is not copied in host memory before.
        is_mapped = policy.trains_on_gpu and not self.is_universal
        maps = config.patch("load.mmap", is_mapped)  # type: ignore[attr-defined]  # torch installs it as it is imported
        with maps, policy.converted_arrives() if self.is_universal else policy.with_states():
            folder, _ = policy.deepspeed_engine.load_checkpoint(
                str(self.folder.parent), tag=self.folder.name, custom_load_fn=load_trained
            )
        assert folder is not None, f"DeepSpeed found nothing in {self.folder}"
        policy.go_to(self.state.step)


def find_source(
    folder: CheckpointFolder,
    data_dir: Path,
    resume_from: str | None,
    *,
    world_size: int,
    zero_stage: int,
    lora: dict[str, Any] | None,
    optimizer_dtype: str,
) -> Source | None:
    """Choose the checkpoint to resume from: the newest good one in `folder`, else that of `resume_from`, else None.

    Collective. Damaged ones are set aside with a warning. The optimizer state is converted if the number of ranks or
    the ZeRO stage has changed, or its moments are to be in 8 bits, or not any more. `resume_from` is
    storage.resumeFrom, a run below `data_dir`.

    Raises:
        ConfigError: all checkpoints are damaged; `resume_from` has none or is not a run on this storage; the
            checkpoint's ZeRO stage or moments cannot be converted, or it was saved with another `lora`.
    """
    own = on_main(lambda: checkpoints(folder.folder))
    candidates = own or on_main(lambda: _of_other(data_dir, resume_from) if resume_from else [])
    damaged: dict[Path, str] = {}
    for checkpoint in candidates:
        if not (found := _faults(checkpoint)):
            on_main(lambda: _fall_back(folder, own, damaged))
            return _source(folder, checkpoint, world_size, zero_stage, lora, optimizer_dtype)
        damaged[checkpoint] = "; ".join(found[:3])
    if damaged:
        listed = ", ".join(f"{checkpoint} ({fault})" for checkpoint, fault in damaged.items())
        raise ConfigError(
            f"storage: none of the run's checkpoints is whole: {listed}. Restore the files, or start a new run, "
            "for example from a model folder that is still good, with model.path"
        )
    return None


def _fall_back(folder: CheckpointFolder, own: list[Path], damaged: dict[Path, str]) -> None:
    for checkpoint, fault in damaged.items():
        logger.warning("CHECKPOINT DAMAGED: %s: %s. Resuming from an older one", checkpoint, fault)
        if checkpoint in own:
            folder.set_aside(checkpoint)


def _of_other(data_dir: Path, run: str) -> list[Path]:
    folder = data_dir / run / "checkpoints"
    if not folder.resolve().is_relative_to(data_dir.resolve()):
        raise ConfigError(f"storage.resumeFrom: {run} is not a run on the storage; use <namespace>/<name>/<uid>")
    if not (found := checkpoints(folder)):
        raise ConfigError(f"storage.resumeFrom: the storage holds no checkpoint of the run {run}")
    return found


def _source(
    folder: CheckpointFolder,
    checkpoint: Path,
    world_size: int,
    zero_stage: int,
    lora: dict[str, Any] | None,
    optimizer_dtype: str,
) -> Source:
    state = on_main(lambda: SavedState.read(checkpoint / STATE))
    if state.lora != lora:
        there = "without lora" if state.lora is None else f"with lora: {dumps(state.lora)}"
        raise ConfigError(
            f"lora: {checkpoint} was saved {there}, and its weights and optimizer state fit nothing else; use the "
            "same lora, or start a new run without storage.resumeFrom"
        )
    saved, is_universal = checkpoint / DEEPSPEED, False
    has_other_moments = (state.optimizer_dtype == "int8") != (optimizer_dtype == "int8")
    # Without ZeRO every rank holds the whole optimizer state, for any number of ranks.
    if state.zero_stage != zero_stage or (state.world_size != world_size and zero_stage > 0) or has_other_moments:
        if 0 in (state.zero_stage, zero_stage):
            model = checkpoint / MODEL if lora is None else f"{checkpoint / MODEL}, merged"
            new = f"start a new run from its weights with model.path: {model}"
            if state.zero_stage == zero_stage:
                raise ConfigError(
                    f"parallelism.optimizerDtype: {checkpoint} was saved with {state.optimizer_dtype} and cannot be "
                    f"loaded with {optimizer_dtype} under ZeRO stage 0; use {state.optimizer_dtype}, or {new}"
                )
            raise ConfigError(
                f"parallelism.zeroStage: {checkpoint} was saved under ZeRO stage {state.zero_stage} and cannot be "
                f"loaded under {zero_stage}: optimizer states are converted between the stages 1, 2 and 3 only; "
                f"use stage {state.zero_stage}, or {new}"
            )
        saved, is_universal = _converted(folder, checkpoint, state), True
    is_own = checkpoint.parent == folder.folder
    return Source(checkpoint=checkpoint, state=state, folder=saved, is_universal=is_universal, is_own=is_own)


def _converted(folder: CheckpointFolder, checkpoint: Path, state: SavedState) -> Path:
    target = folder.universal(checkpoint)
    if not _faults(target):
        return target
    logger.info("converting %s (%d ranks, ZeRO-%d)", checkpoint, state.world_size, state.zero_stage)
    scratch = on_main(lambda: folder.begin(target.name))
    conversion = Conversion(checkpoint / DEEPSPEED, scratch) if dist.get_rank() == 0 else None
    # Polled, since it may take longer than a collective's time limit.
    while on_main(lambda: conversion and conversion.poll()) is None:
        time.sleep(0.5)
    return on_main(lambda: _publish_conversion(folder, conversion, scratch, target))


def _publish_conversion(folder: CheckpointFolder, conversion: Conversion | None, scratch: Path, target: Path) -> Path:
    assert conversion is not None
    if conversion.poll() != 0:
        folder.abandon(scratch)
        raise StorageError(f"storage: the optimizer state could not be converted into {target}: {conversion.output()}")
    folder.replace(target)
    return folder.publish(scratch)


def _faults(folder: Path) -> list[str]:
    """Return what is wrong with a folder that has a manifest; each rank reads its share of the files."""
    try:
        entries = on_main(lambda: read_manifest(folder))
    except ValueError as error:
        return [str(error)]
    own = sorted(entries)[dist.get_rank() :: dist.get_world_size()]
    return [fault for found in gather(faults(folder, entries, own)) for fault in found]
