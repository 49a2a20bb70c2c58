"""Models for others (`storage.export`), beside the checkpoints of a run: each is whole once it has its name.

<data folder>/<run>/exports/step-N/    what from_pretrained loads, a model card, and a manifest of the files
<uploadTo>/<run>/step-N/               the same, where asked for; whole once it has the manifest
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_spec.storage import ExportConfig
from grpo_workload.policy.step.finite import check_weights
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import on_main
from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_folder import CheckpointFolder
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.model_folder import copied_bytes, write_model
from grpo_workload.storage.publishing import Pending
from grpo_workload.storage.upload_queue import UploadQueue
from grpo_workload.storage.writer import CheckpointWriter, num_bytes


class Exports:
    """The exports of one run, for the ranks of one attempt. `begin` is collective."""

    def __init__(self, data_dir: Path, run: str, config: ExportConfig, fence: Fence) -> None:
        """Open the folder of `run`; collective. Exports that an earlier attempt has not finished are removed.

        Raises ConfigError or StorageError if they are to be uploaded, and that cannot be.
        """
        self._config = config
        self._folder = on_main(lambda: CheckpointFolder(data_dir / run / "exports", keep=config.keep, fence=fence))
        self._uploads: UploadQueue | None = None  # on rank 0
        on_main(lambda: self._open_uploads(run))

    def is_due(self, step: int, before: int) -> bool:
        """Return whether to export after `step` steps, when it could last be done after `before` steps."""
        return step // self._config.every_steps > before // self._config.every_steps

    def keeps_adapters(self, policy: Policy) -> bool:
        """Return whether an export is the policy's adapters, not a whole model."""
        return policy.adapters is not None and self._config.lora == "adapters"

    def begin(
        self, policy: Policy, processing_class: Any, step: int, card: str, background: Background | None = None
    ) -> Pending:
        """Write the model after `step` steps, with `card`; with `background`, copy it, and write the copy meanwhile.

        One of the same step, of weights that were lost, goes.

        Raises:
            SupersededError: a newer attempt has taken over the run.
            NotFiniteError: weights are not finite.
        """
        check_weights(policy.module, step)
        name = f"step-{step}"
        scratch = on_main(lambda: self._folder.begin(name))
        on_main(lambda: self._folder.replace(self._folder.folder / name))
        writer = CheckpointWriter(scratch, background)
        write_model(writer, scratch, policy, processing_class, card, is_adapters=self.keeps_adapters(policy))
        return Pending(
            folder=self._folder, scratch=scratch, writer=writer, size=num_bytes(policy.module), background=background
        )

    def upload(self, export: Path) -> None:
        """Upload an export that has just been published, if it is to be; returns at once."""
        if self._uploads is not None:
            self._uploads.add(export.name)

    def turn(self) -> None:
        """Look after uploads; returns at once. Call it at each step."""
        if self._uploads is not None:
            self._uploads.turn()

    @property
    def is_uploading(self) -> bool:
        """Whether exports are not uploaded yet, as far as this rank looks after that."""
        return self._uploads is not None and self._uploads.is_pending

    def finish(self, waits: Callable[[], bool]) -> bool:
        """Wait until all exports are uploaded, as long as `waits` says so; return whether they are. Not collective.

        Raises StorageError if the storage still fails.
        """
        return self._uploads is None or self._uploads.finish(waits)

    def _open_uploads(self, run: str) -> None:
        if self._config.upload_to is not None:
            self._uploads = UploadQueue(self._folder.folder, f"{self._config.upload_to.rstrip('/')}/{run}")

    def num_bytes(self, policy: Policy) -> int:
        """Return the bytes that this rank copies when `begin` writes in the background."""
        return copied_bytes(policy, is_adapters=self.keeps_adapters(policy))
