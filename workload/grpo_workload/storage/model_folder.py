"""Writes a folder that `from_pretrained` loads: a model, or adapters, with tokenizer or processor and a card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_workload.policy.memory.host_memory import aligned
from grpo_workload.policy.step.policy import Policy
from grpo_workload.storage.writer import CheckpointWriter, own_files
from grpo_workload.weights.export import Export


def write_model(
    writer: CheckpointWriter, folder: Path, policy: Policy, processing_class: Any, card: str, *, is_adapters: bool
) -> None:
    """Write the policy's adapters, or its whole model, each rank its part; collective. `card` may be empty."""
    if not is_adapters:
        rest = partial(_rest, policy.save_config, processing_class, card)
        writer.write_weights(folder, policy.merged_weights(), rest)
        return
    is_main = dist.get_rank() == 0
    weights = {name: writer.on_host(tensor) for name, tensor in policy.adapter_weights() if is_main}
    if is_main:
        # At once: peft uses the module, which only the thread that trains may do.
        writer.add(folder, lambda folder: policy.save_adapters(folder, weights), at_once=True)
        writer.add(folder, partial(_rest, lambda _: None, processing_class, card))


def copied_bytes(policy: Policy, *, is_adapters: bool) -> int:
    """Return the bytes that this rank copies when `write_model` writes in the background."""
    if not is_adapters:
        return own_bytes(policy.merged_weights())
    return sum(aligned(spec.num_bytes) for spec in policy.adapter_weights().specs) if dist.get_rank() == 0 else 0


def own_bytes(weights: Export) -> int:
    """Return the bytes that this rank copies of a model's weights."""
    files = own_files(weights)
    return sum(aligned(spec.num_bytes) for spec in weights.specs if spec.name in files)


def _rest(save_config: Callable[[Path], None], processing_class: Any, card: str, folder: Path) -> None:
    save_config(folder)
    processing_class.save_pretrained(folder)
    if card:
        (folder / "README.md").write_text(card)
