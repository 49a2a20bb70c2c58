"""Checkpoints of a run: what is in one, and how all ranks save it, choose one to go on from, and load it.

    step-N/  model/         for from_pretrained: config, safetensors, tokenizer; with LoRA peft's, the adapters without their model
             deepspeed/     optimizer and master weights, one part a rank
             trainer.json   `TrainerState`
             manifest.json  every file's size and checksum

`lineage` says how they are kept. Random states are not: they are seeded from the run's seed, the step and the prompt (`seeds`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_workload.checkpoint_writer import CheckpointWriter, StorageError, full_message, load_trained
from grpo_workload.claim import Claim
from grpo_workload.collectives import gather, on_main
from grpo_workload.engine import Policy
from grpo_workload.files import make_readable
from grpo_workload.lineage import Lineage, checkpoints
from grpo_workload.manifest import faults, read_manifest, write_manifest
from grpo_workload.origin import Origin
from grpo_workload.universal import Conversion

_MODEL = "model"
_DEEPSPEED = "deepspeed"
_STATE = "trainer.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a run needs to continue besides weights and optimizer."""

    step: int  # optimizer steps taken
    weight_version: int
    num_tokens: int  # of prompts and completions since the start of the run
    world_size: int
    zero_stage: int
    lora: dict[str, Any] | None = None  # `TrainerConfig.adapters`
    origin: Origin | None = None  # of the weights that the run began with

    @classmethod
    def read(cls, path: Path) -> TrainerState:
        """From the file that `_write_state` wrote."""
        raw = loads(path.read_text())
        return cls(**raw | {"origin": raw["origin"] and Origin(**raw["origin"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a run goes on from."""

    checkpoint: Path
    state: TrainerState
    folder: Path  # with the optimizer's state, as these ranks under this ZeRO stage can load it
    is_universal: bool

    def load(self, policy: Policy) -> None:
        """Put `policy`, made with `load_universal=is_universal`, into the saved state; collective."""
        with policy.with_states():
            folder, _ = policy.engine.load_checkpoint(str(self.folder.parent), tag=self.folder.name, custom_load_fn=load_trained)
        assert folder is not None, f"DeepSpeed found nothing in {self.folder}"
        policy.go_to(self.state.step)


class Checkpoints:
    """The checkpoints of one run, as the ranks of one epoch see them. All methods are collective."""

    def __init__(self, data_dir: Path, run: str, *, keep: int, epoch: int, pod_uid: str) -> None:
        """Claim the run for `epoch`; from here on older epochs publish nothing.

        Args:
            data_dir: the storage that all ranks share.
            run: folder of the run below it.
            keep: so many newest checkpoints stay.
            epoch: the operator's count of attempts.
            pod_uid: of this rank's pod; that of rank 0 counts.

        Raises:
            SupersededError: another pod or a newer epoch holds the run.
        """
        self._data_dir = data_dir
        self._folder = data_dir / run / "checkpoints"
        self._lineage = on_main(lambda: Lineage(self._folder, keep=keep, claim=Claim.take(data_dir / run, epoch, pod_uid)))

    def check(self) -> None:
        """Raise SupersededError on all ranks when a newer epoch has taken over the run."""
        on_main(self._lineage.check)

    def save(self, policy: Policy, tokenizer: Any, state: TrainerState) -> Path:
        """Write the checkpoint of `state.step`. It takes its name only when all of it is on the disk.

        Returns:
            Its folder, relative to the data folder.

        Raises:
            SupersededError: a newer epoch has taken over the run.
            StorageError: it could not be written; checkpoints of before are as they were.
        """
        scratch = on_main(lambda: self._lineage.begin(f"step-{state.step}"))
        writer = CheckpointWriter(scratch)
        writer.save_engine(policy.engine, _DEEPSPEED)
        is_main = dist.get_rank() == 0
        weights = {name: tensor.cpu() for name, tensor in policy.saved_weights() if is_main}
        if is_main:
            writer.attempt(scratch / _MODEL, lambda: _write_model(policy, tokenizer, weights, scratch / _MODEL))
            writer.attempt(scratch / _STATE, lambda: _write_state(state, scratch / _STATE))
        written = gather((writer.entries, writer.failure))
        published = on_main(lambda: self._publish(scratch, written, _bytes_of(policy)))
        return published.relative_to(self._data_dir)

    def _publish(self, scratch: Path, written: list[Any], num_bytes: int) -> Path:
        failure = next((failure for _, failure in written if failure is not None), None)
        try:
            self._lineage.check()  # where a newer epoch has taken the files away, that is the cause to be told
            if failure is not None:
                raise OSError(failure)
            write_manifest(scratch, {name: entry for entries, _ in written for name, entry in entries.items()})
            published = self._lineage.publish(scratch)
        except OSError as error:
            newest = next(iter(checkpoints(self._folder)), None)
            message = full_message(error, scratch, num_bytes, newest)  # before room is made
            self._lineage.abandon(scratch)
            raise StorageError(message) from error
        self._lineage.prune()
        return published

    def find(self, resume_from: str | None, *, world_size: int, zero_stage: int, lora: dict[str, Any] | None = None) -> Source | None:
        """What to go on from: the run's own newest good checkpoint, else that of `resume_from` (storage.resumeFrom), else nothing.

        Damaged ones are set aside with a warning. For another number of ranks or ZeRO stage, the optimizer's state is converted.

        Raises:
            ValueError: all checkpoints are damaged, `resume_from` has none or is no run of this storage, its stage cannot be converted, or
                it was saved with another `lora`.
        """
        own = on_main(lambda: checkpoints(self._folder))
        candidates = own or on_main(lambda: self._of_other(resume_from) if resume_from else [])
        damaged: dict[Path, str] = {}
        for checkpoint in candidates:
            if not (found := _faults(checkpoint)):
                on_main(lambda: self._fall_back(own, damaged))
                return self._source(checkpoint, world_size, zero_stage, lora)
            damaged[checkpoint] = "; ".join(found[:3])
        if damaged:
            listed = ", ".join(f"{checkpoint} ({fault})" for checkpoint, fault in damaged.items())
            raise ValueError(
                f"storage: none of the run's checkpoints is whole: {listed}. Restore the files, or start a new run, "
                "for example from a model folder that is still good, with model.path"
            )
        return None

    def _fall_back(self, own: list[Path], damaged: dict[Path, str]) -> None:
        for checkpoint, fault in damaged.items():
            logger.warning("CHECKPOINT DAMAGED: %s: %s. Going on from an older one", checkpoint, fault)
            if checkpoint in own:
                self._lineage.set_aside(checkpoint)

    def _of_other(self, run: str) -> list[Path]:
        folder = self._data_dir / run / "checkpoints"
        if not folder.resolve().is_relative_to(self._data_dir.resolve()):
            raise ValueError(f"storage.resumeFrom: {run} is not a run below the storage; use <namespace>/<name>/<uid>")
        if not (found := checkpoints(folder)):
            raise ValueError(f"storage.resumeFrom: the storage holds no checkpoint of the run {run}")
        return found

    def _source(self, checkpoint: Path, world_size: int, zero_stage: int, lora: dict[str, Any] | None) -> Source:
        state = on_main(lambda: TrainerState.read(checkpoint / _STATE))
        if state.lora != lora:
            there = "without lora" if state.lora is None else f"with lora: {dumps(state.lora)}"
            raise ValueError(
                f"lora: {checkpoint} was saved {there}, and its weights and optimizer's state fit nothing else; use the same lora, "
                "or start a new run without storage.resumeFrom"
            )
        folder, is_universal = checkpoint / _DEEPSPEED, False
        # Without ZeRO every rank holds all of the optimizer's state, whatever their number.
        if state.zero_stage != zero_stage or (state.world_size != world_size and zero_stage > 0):
            if 0 in (state.zero_stage, zero_stage):
                model = checkpoint / _MODEL if lora is None else f"{checkpoint / _MODEL}, merged"
                raise ValueError(
                    f"parallelism.zeroStage: {checkpoint} was saved under ZeRO stage {state.zero_stage} and cannot be loaded under "
                    f"{zero_stage}: optimizer states are converted between the stages 1, 2 and 3 only; use stage {state.zero_stage}, "
                    f"or start a new run from its weights with model.path: {model}"
                )
            folder, is_universal = self._converted(checkpoint, state), True
        return Source(checkpoint=checkpoint, state=state, folder=folder, is_universal=is_universal)

    def _converted(self, checkpoint: Path, state: TrainerState) -> Path:
        target = self._lineage.universal(checkpoint)
        if not _faults(target):
            return target
        logger.info("converting the optimizer's state of %s (%d ranks, ZeRO-%d)", checkpoint, state.world_size, state.zero_stage)
        scratch = on_main(lambda: self._lineage.begin(target.name))
        conversion = Conversion(checkpoint / _DEEPSPEED, scratch) if dist.get_rank() == 0 else None
        # It may take longer than a collective may wait.
        while on_main(lambda: conversion and conversion.poll()) is None:
            time.sleep(0.5)
        return on_main(lambda: self._publish_conversion(conversion, scratch, target))

    def _publish_conversion(self, conversion: Conversion | None, scratch: Path, target: Path) -> Path:
        assert conversion is not None
        if conversion.poll() != 0:
            self._lineage.abandon(scratch)
            raise StorageError(f"storage: the optimizer's state could not be converted into {target}: {conversion.output()}")
        self._lineage.replace(target)
        return self._lineage.publish(scratch)


def _faults(folder: Path) -> list[str]:
    """What is wrong with a folder that has a manifest; each rank reads its share of the files."""
    try:
        entries = on_main(lambda: read_manifest(folder))
    except ValueError as error:
        return [str(error)]
    own = sorted(entries)[dist.get_rank() :: dist.get_world_size()]
    return [fault for found in gather(faults(folder, entries, own)) for fault in found]


def _write_model(policy: Policy, tokenizer: Any, weights: dict[str, Any], folder: Path) -> list[Path]:
    policy.save_pretrained(folder, weights)
    tokenizer.save_pretrained(folder)
    make_readable(folder)
    return list(folder.iterdir())


def _write_state(state: TrainerState, path: Path) -> list[Path]:
    path.write_text(dumps(asdict(state)))
    return [path]


def _bytes_of(policy: Policy) -> int:
    """About what a checkpoint takes: trained weights twice (for from_pretrained, and DeepSpeed's), masters and two moments in float32."""
    trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    return sum(getattr(p, "ds_numel", p.numel()) * (2 * p.element_size() + 12) for p in trained)
