"""Checkpoints of a run: how all ranks save one. `checkpoint_content` says what is in it, and `resuming` loads it.

`checkpoint_folder` says which ones are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_workload.policy.step.finite import check_weights
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import on_main
from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_content import DEEPSPEED, MODEL, REFERENCE, STATE, SavedState
from grpo_workload.storage.checkpoint_folder import CheckpointFolder
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.model_folder import copied_bytes, own_bytes, write_model
from grpo_workload.storage.publishing import Pending
from grpo_workload.storage.resuming import Source, find_source
from grpo_workload.storage.writer import CheckpointWriter, Measure, num_bytes, save_deepspeed


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
        self, policy: Policy, processing_class: Any, state: SavedState, *, best: int | None = None, card: str = ""
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
        state: SavedState,
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
        save_deepspeed(policy.deepspeed_engine, writer, scratch, DEEPSPEED)
        is_adapters = policy.adapters is not None
        write_model(writer, scratch / MODEL, policy, processing_class, card, is_adapters=is_adapters)
        if dist.get_rank() == 0:
            writer.guard(scratch / STATE, lambda: state.write(scratch / STATE))
        if (reference := policy.moved_reference) is not None:
            writer.write_weights(scratch / REFERENCE, reference.weights(), reference.save_config)
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
        save_deepspeed(policy.deepspeed_engine, measure, self._path, DEEPSPEED)
        reference = policy.following_reference
        moved = own_bytes(reference.weights()) if reference else 0
        return measure.size + copied_bytes(policy, is_adapters=policy.adapters is not None) + moved

    def relative(self, folder: Path) -> Path:
        """Return a published folder, relative to the data folder."""
        return folder.relative_to(self._data_dir)

    @property
    def fence(self) -> Fence:
        """The proof that this attempt is the newest."""
        return self._folder.fence

    def find(
        self,
        resume_from: str | None,
        *,
        world_size: int,
        zero_stage: int,
        lora: dict[str, Any] | None = None,
        optimizer_dtype: str = "float32",
    ) -> Source | None:
        """Choose the checkpoint to resume from, see `find_source`."""
        return find_source(
            self._folder,
            self._data_dir,
            resume_from,
            world_size=world_size,
            zero_stage=zero_stage,
            lora=lora,
            optimizer_dtype=optimizer_dtype,
        )
