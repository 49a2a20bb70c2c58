"""Models for others (`storage.export`), beside the checkpoints of a run: each is whole once it has its name.

<data folder>/<run>/exports/step-N/    what from_pretrained loads, a model card, and a manifest of the files
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_workload.policy.finite import check_weights
from grpo_workload.policy.policy import Policy
from grpo_workload.ranks.collectives import on_main
from grpo_workload.spec.storage import ExportConfig
from grpo_workload.storage.checkpoint_folder import CheckpointFolder
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.writer import CheckpointWriter, num_bytes, publish, write_model


class Exports:
    """The exports of one run, for the ranks of one attempt. `save` is collective."""

    def __init__(self, run_dir: Path, config: ExportConfig, fence: Fence) -> None:
        """Open the folder; collective. Exports that an earlier attempt has not finished are removed."""
        self._config = config
        self._folder = on_main(lambda: CheckpointFolder(run_dir / "exports", keep=config.keep, fence=fence))

    def is_due(self, step: int, before: int) -> bool:
        """Return whether to export after `step` steps, when it could last be done after `before` steps."""
        return step // self._config.every_steps > before // self._config.every_steps

    def keeps_adapters(self, policy: Policy) -> bool:
        """Return whether an export is the policy's adapters, not a whole model."""
        return policy.adapters is not None and self._config.lora == "adapters"

    def save(self, policy: Policy, processing_class: Any, step: int, card: str) -> None:
        """Write the model after `step` steps, with `card`. One of the same step, of weights that were lost, goes.

        Raises:
            SupersededError: a newer attempt has taken over the run.
            NotFiniteError: weights are not finite.
            StorageError: it could not be written.
        """
        check_weights(policy.module, step)
        name = f"step-{step}"
        scratch = on_main(lambda: self._folder.begin(name))
        on_main(lambda: self._folder.replace(self._folder.folder / name))
        writer, is_main = CheckpointWriter(scratch), dist.get_rank() == 0
        keeps_adapters = self.keeps_adapters(policy)
        source = policy.saved_weights() if keeps_adapters else policy.merged_weights()
        # Copies, since DeepSpeed's weights may be views of one buffer, which safetensors refuses.
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in source if is_main}
        if is_main:
            write = partial(policy.save_pretrained if keeps_adapters else policy.save_merged, scratch, weights)
            writer.guard(scratch, lambda: write_model(scratch, write, processing_class, card))
        publish(self._folder, scratch, writer, num_bytes(policy.module))
