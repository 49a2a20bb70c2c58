"""Checkpoints of a run: what is in them, how they come into being whole, and which one to go on from.

    <data folder>/<run>/checkpoints/step-N/   model/      for from_pretrained: config, safetensors, tokenizer
                                              deepspeed/  optimizer and master weights, one part a rank
                                              trainer.json
    <data folder>/<run>/checkpoints/latest    name of the newest one

Random states are not kept: a step seeds them from the run's seed, the step and the rank (`train.seed_step`).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_workload.engine import Policy
from grpo_workload.files import make_readable

_MODEL = "model"
_DEEPSPEED = "deepspeed"
_STATE = "trainer.json"
_LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a run needs to continue besides weights and optimizer."""

    step: int  # optimizer steps taken
    weight_version: int
    num_tokens: int  # of prompts and completions since the start of the run
    world_size: int
    zero_stage: int


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, data_dir: Path, run: str, *, keep: int) -> None:
        """Below `data_dir`, the storage that all ranks share; `keep` newest ones stay."""
        self._data_dir = data_dir
        self._folder = data_dir / run / "checkpoints"
        self._keep = keep

    def save(self, policy: Policy, tokenizer: Any, state: TrainerState) -> Path:
        """Write the checkpoint of `state.step`; collective. It takes its name only when all of it is on the disk.

        Returns:
            Its folder, relative to the data folder.
        """
        target = self._folder / f"step-{state.step}"
        scratch = self._folder / f".step-{state.step}.tmp"
        is_main = dist.get_rank() == 0
        if is_main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        dist.barrier()
        policy.engine.save_checkpoint(str(scratch), tag=_DEEPSPEED)
        weights = {name: tensor.cpu() for name, tensor in policy.weights() if is_main}
        dist.barrier()
        if is_main:
            policy.module.save_pretrained(scratch / _MODEL, state_dict=weights)
            tokenizer.save_pretrained(scratch / _MODEL)
            (scratch / _STATE).write_text(dumps(asdict(state)))
            _publish(scratch, target)
            self._prune()
        dist.barrier()
        return target.relative_to(self._data_dir)

    def _prune(self) -> None:
        for old in sorted(self._folder.glob("step-*"), key=_step)[: -self._keep]:
            shutil.rmtree(old)

    def latest(self) -> Path | None:
        """Folder of the newest checkpoint of the run, if it has one."""
        return _latest(self._folder)

    def find(self, resume_from: str | None) -> Path | None:
        """The checkpoint to go on from: the run's own newest, else that of `resume_from` (storage.resumeFrom), else none.

        Raises:
            ValueError: `resume_from` has no checkpoint, or is not below the data folder.
        """
        if (own := self.latest()) is not None or resume_from is None:
            return own
        folder = self._data_dir / resume_from / "checkpoints"
        if not folder.resolve().is_relative_to(self._data_dir.resolve()):
            raise ValueError(f"storage.resumeFrom: {resume_from} is not a run below the storage; use <namespace>/<name>/<uid>")
        if (other := _latest(folder)) is None:
            raise ValueError(f"storage.resumeFrom: the storage holds no checkpoint of the run {resume_from}")
        return other


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def load(checkpoint: Path, policy: Policy, *, world_size: int, zero_stage: int) -> TrainerState:
    """Put `policy` into the state it was saved in; collective.

    Raises:
        ValueError: it was saved by another number of ranks, or under another ZeRO stage: the optimizer's parts would not fit.
    """
    state = TrainerState(**loads((checkpoint / _STATE).read_text()))
    if state.world_size != world_size:
        raise ValueError(
            f"{checkpoint}: the optimizer's state was saved by {state.world_size} ranks and cannot be loaded by {world_size}; run with "
            f"{state.world_size} ranks, or start a new run from its weights with model.path: {checkpoint / _MODEL}"
        )
    if state.zero_stage != zero_stage:
        raise ValueError(
            f"parallelism.zeroStage: {checkpoint} was saved under ZeRO stage {state.zero_stage}, not {zero_stage}; use that stage, or "
            f"start a new run from its weights with model.path: {checkpoint / _MODEL}"
        )
    folder, _ = policy.engine.load_checkpoint(str(checkpoint), tag=_DEEPSPEED)
    assert folder is not None, f"DeepSpeed found nothing in {checkpoint}"
    policy.go_to(state.step)
    return state


def _latest(folder: Path) -> Path | None:
    pointer = folder / _LATEST
    return folder / pointer.read_text() if pointer.exists() else None


def _publish(scratch: Path, target: Path) -> None:
    make_readable(scratch)
    for path in [*scratch.rglob("*"), scratch]:
        _sync(path)
    # A run that goes on from an earlier checkpoint comes by steps that an interrupted one has saved before.
    if target.exists():
        shutil.rmtree(target)
    scratch.rename(target)
    pointer = target.with_name(f".{_LATEST}.tmp")
    pointer.write_text(target.name)
    _sync(pointer)
    pointer.replace(target.with_name(_LATEST))
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
