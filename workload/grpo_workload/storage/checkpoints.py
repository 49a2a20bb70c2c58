"""Checkpoints of a run: what one contains, and how all ranks save it, choose one to resume from, and load it.

    step-N/  model/         for from_pretrained: config, safetensors, tokenizer; with LoRA, peft's adapters alone
             deepspeed/     optimizer state and master weights, one part per rank
             trainer.json   `TrainerState`
             manifest.json  every file's size and checksum

`checkpoint_folder` says which ones are kept. Random states are not saved: they are seeded from the run's seed, the step
and the prompt (`ranks.seeds`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_workload.policy.finite import check_weights
from grpo_workload.policy.policy import Policy
from grpo_workload.policy.reference import Reference
from grpo_workload.ranks.collectives import gather, on_main
from grpo_workload.spec.errors import ConfigError
from grpo_workload.storage.background import Background
from grpo_workload.storage.base_model import Origin
from grpo_workload.storage.checkpoint_folder import CheckpointFolder, checkpoints
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.files import StorageError
from grpo_workload.storage.manifest import faults, read_manifest
from grpo_workload.storage.publishing import Pending
from grpo_workload.storage.writer import (
    CheckpointWriter,
    Measure,
    load_trained,
    num_bytes,
    on_host_bytes,
    save_deepspeed,
)
from grpo_workload.storage.zero_conversion import Conversion

_MODEL = "model"
_DEEPSPEED = "deepspeed"
_REFERENCE = "reference"
_STATE = "trainer.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a run needs to resume, in addition to weights and optimizer state."""

    step: int  # optimizer steps taken
    weight_version: int
    num_tokens: int  # tokens of prompts and completions since the run began
    world_size: int
    zero_stage: int
    lora: dict[str, Any] | None = None  # `TrainerConfig.adapters`
    origin: Origin | None = None  # base model that the run began with

    @classmethod
    def read(cls, path: Path) -> TrainerState:
        """Read the file that `_write_state` wrote."""
        raw = loads(path.read_text())
        return cls(**raw | {"origin": raw["origin"] and Origin(**raw["origin"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint to resume from."""

    checkpoint: Path
    state: TrainerState
    folder: Path  # optimizer state that this number of ranks and this ZeRO stage can load
    is_universal: bool

    @property
    def reference(self) -> Path | None:
        """The reference model, if it had followed the policy (`training.syncRefModel`)."""
        folder = self.checkpoint / _REFERENCE
        return folder if folder.is_dir() else None

    def load(self, policy: Policy) -> None:
        """Load the saved state into `policy`, which was built with `load_universal=is_universal`; collective."""
        with policy.with_states():
            folder, _ = policy.deepspeed_engine.load_checkpoint(
                str(self.folder.parent), tag=self.folder.name, custom_load_fn=load_trained
            )
        assert folder is not None, f"DeepSpeed found nothing in {self.folder}"
        policy.go_to(self.state.step)


class Checkpoints:
    """The checkpoints of one run, for the ranks of one attempt. All methods are collective."""

    def __init__(self, data_dir: Path, run: str, *, keep: int, attempt: int, pod_uid: str) -> None:
        """Take the run's fence for `attempt`; from now on older attempts publish nothing.

        Args:
            data_dir: the storage that all ranks share.
            run: the run's folder, relative to `data_dir`.
            keep: how many of the newest checkpoints stay.
            attempt: the operator's number of the attempt.
            pod_uid: uid of this rank's pod; only that of rank 0 is used.

        Raises:
            SupersededError: another pod or a newer attempt holds the fence.
        """
        self._data_dir = data_dir
        self._path = data_dir / run / "checkpoints"
        self._folder = on_main(
            lambda: CheckpointFolder(self._path, keep=keep, fence=Fence.take(data_dir / run, attempt, pod_uid))
        )

    def check(self) -> None:
        """Raise SupersededError on all ranks if a newer attempt has taken over the run."""
        on_main(self._folder.check)

    def save(
        self, policy: Policy, processing_class: Any, state: TrainerState, *, best: int | None = None, card: str = ""
    ) -> Path:
        """Write the checkpoint of `state.step`, which gets its name only when all of it is on the disk.

        Like `begin`, and waits until it is published. Returns its folder, relative to the data folder.

        Raises:
            SupersededError: a newer attempt has taken over the run.
            NotFiniteError: weights are not finite; earlier checkpoints are unchanged.
            StorageError: the checkpoint could not be written; earlier checkpoints are unchanged.
        """
        return self.relative(self.begin(policy, processing_class, state, best=best, card=card).publish())

    def begin(
        self,
        policy: Policy,
        processing_class: Any,
        state: TrainerState,
        *,
        best: int | None = None,
        card: str = "",
        background: Background | None = None,
    ) -> Pending:
        """Write the checkpoint of `state.step`; with `background`, copy it, and write the copy meanwhile.

        That of step `best` stays, however old it is. `card` describes the model.

        Raises:
            SupersededError: a newer attempt has taken over the run.
            NotFiniteError: weights are not finite.
        """
        check_weights(policy.module, state.step)
        scratch = on_main(lambda: self._folder.begin(f"step-{state.step}"))
        writer = CheckpointWriter(scratch, background)
        save_deepspeed(policy.deepspeed_engine, writer, scratch, _DEEPSPEED)
        is_main = dist.get_rank() == 0
        weights = {name: writer.on_host(tensor) for name, tensor in policy.saved_weights() if is_main}
        if is_main:
            save = partial(policy.save_pretrained, scratch / _MODEL, weights)
            has_adapters = policy.adapters is not None
            writer.write_model(scratch / _MODEL, save, processing_class, card, at_once=has_adapters)
            writer.guard(scratch / _STATE, lambda: _write_state(state, scratch / _STATE))
        if (reference := policy.moved_reference) is not None:
            moved = {name: writer.on_host(tensor) for name, tensor in reference.weights() if is_main}
            if is_main:
                writer.guard(scratch / _REFERENCE, lambda: _write_reference(reference, moved, scratch / _REFERENCE))
        return Pending(
            folder=self._folder,
            scratch=scratch,
            writer=writer,
            size=num_bytes(policy.module),
            best=best,
            background=background,
        )

    def num_bytes(self, policy: Policy) -> int:
        """Return the bytes that this rank copies when `begin` writes in the background; collective."""
        measure = Measure()
        save_deepspeed(policy.deepspeed_engine, measure, self._path, _DEEPSPEED)
        reference = policy.following_reference
        moved = on_host_bytes(reference.weights()) if reference else 0
        return measure.size + on_host_bytes(policy.saved_weights()) + moved

    def relative(self, folder: Path) -> Path:
        """Return a published folder, relative to the data folder."""
        return folder.relative_to(self._data_dir)

    @property
    def fence(self) -> Fence:
        """What shows that this attempt is the newest."""
        return self._folder.fence

    def find(
        self, resume_from: str | None, *, world_size: int, zero_stage: int, lora: dict[str, Any] | None = None
    ) -> Source | None:
        """Choose the checkpoint to resume from: the run's newest good one, else that of `resume_from`, else None.

        Damaged ones are set aside with a warning. The optimizer state is converted if the number of ranks or the ZeRO
        stage has changed. `resume_from` is storage.resumeFrom.

        Raises:
            ConfigError: all checkpoints are damaged; `resume_from` has none or is not a run on this storage; the
                checkpoint's ZeRO stage cannot be converted, or it was saved with another `lora`.
        """
        own = on_main(lambda: checkpoints(self._path))
        candidates = own or on_main(lambda: self._of_other(resume_from) if resume_from else [])
        damaged: dict[Path, str] = {}
        for checkpoint in candidates:
            if not (found := _faults(checkpoint)):
                on_main(lambda: self._fall_back(own, damaged))
                return self._source(checkpoint, world_size, zero_stage, lora)
            damaged[checkpoint] = "; ".join(found[:3])
        if damaged:
            listed = ", ".join(f"{checkpoint} ({fault})" for checkpoint, fault in damaged.items())
            raise ConfigError(
                f"storage: none of the run's checkpoints is whole: {listed}. Restore the files, or start a new run, "
                "for example from a model folder that is still good, with model.path"
            )
        return None

    def _fall_back(self, own: list[Path], damaged: dict[Path, str]) -> None:
        for checkpoint, fault in damaged.items():
            logger.warning("CHECKPOINT DAMAGED: %s: %s. Resuming from an older one", checkpoint, fault)
            if checkpoint in own:
                self._folder.set_aside(checkpoint)

    def _of_other(self, run: str) -> list[Path]:
        folder = self._data_dir / run / "checkpoints"
        if not folder.resolve().is_relative_to(self._data_dir.resolve()):
            raise ConfigError(f"storage.resumeFrom: {run} is not a run on the storage; use <namespace>/<name>/<uid>")
        if not (found := checkpoints(folder)):
            raise ConfigError(f"storage.resumeFrom: the storage holds no checkpoint of the run {run}")
        return found

    def _source(self, checkpoint: Path, world_size: int, zero_stage: int, lora: dict[str, Any] | None) -> Source:
        state = on_main(lambda: TrainerState.read(checkpoint / _STATE))
        if state.lora != lora:
            there = "without lora" if state.lora is None else f"with lora: {dumps(state.lora)}"
            raise ConfigError(
                f"lora: {checkpoint} was saved {there}, and its weights and optimizer state fit nothing else; use the "
                "same lora, or start a new run without storage.resumeFrom"
            )
        folder, is_universal = checkpoint / _DEEPSPEED, False
        # Without ZeRO every rank holds the whole optimizer state, for any number of ranks.
        if state.zero_stage != zero_stage or (state.world_size != world_size and zero_stage > 0):
            if 0 in (state.zero_stage, zero_stage):
                model = checkpoint / _MODEL if lora is None else f"{checkpoint / _MODEL}, merged"
                raise ConfigError(
                    f"parallelism.zeroStage: {checkpoint} was saved under ZeRO stage {state.zero_stage} and cannot be "
                    f"loaded under {zero_stage}: optimizer states are converted between the stages 1, 2 and 3 only; "
                    f"use stage {state.zero_stage}, or start a new run from its weights with model.path: {model}"
                )
            folder, is_universal = self._converted(checkpoint, state), True
        return Source(checkpoint=checkpoint, state=state, folder=folder, is_universal=is_universal)

    def _converted(self, checkpoint: Path, state: TrainerState) -> Path:
        target = self._folder.universal(checkpoint)
        if not _faults(target):
            return target
        logger.info("converting %s (%d ranks, ZeRO-%d)", checkpoint, state.world_size, state.zero_stage)
        scratch = on_main(lambda: self._folder.begin(target.name))
        conversion = Conversion(checkpoint / _DEEPSPEED, scratch) if dist.get_rank() == 0 else None
        # Polled, since it may take longer than a collective's time limit.
        while on_main(lambda: conversion and conversion.poll()) is None:
            time.sleep(0.5)
        return on_main(lambda: self._publish_conversion(conversion, scratch, target))

    def _publish_conversion(self, conversion: Conversion | None, scratch: Path, target: Path) -> Path:
        assert conversion is not None
        if conversion.poll() != 0:
            self._folder.abandon(scratch)
            raise StorageError(
                f"storage: the optimizer state could not be converted into {target}: {conversion.output()}"
            )
        self._folder.replace(target)
        return self._folder.publish(scratch)


def _faults(folder: Path) -> list[str]:
    """Return what is wrong with a folder that has a manifest; each rank reads its share of the files."""
    try:
        entries = on_main(lambda: read_manifest(folder))
    except ValueError as error:
        return [str(error)]
    own = sorted(entries)[dist.get_rank() :: dist.get_world_size()]
    return [fault for found in gather(faults(folder, entries, own)) for fault in found]


def _write_reference(reference: Reference, weights: dict[str, Any], folder: Path) -> list[Path]:
    reference.save(folder, weights)
    return list(folder.iterdir())


def _write_state(state: TrainerState, path: Path) -> list[Path]:
    path.write_text(dumps(asdict(state)))
    return [path]
