"""The reference model (TRL's `ref_model`), to which the KL term (`beta` > 0) compares the policy.

It is the initial model. With `syncRefModel` it follows the policy, and its weights are part of checkpoints.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model.checkpoint_names import CheckpointNames, save_config
from grpo_workload.policy.model.load import load_model, restore_buffers
from grpo_workload.ranks.sequence_group import SequenceGroup
from grpo_workload.weights.export import Export, full

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen copy of the initial model or, with adapters, the policy itself with its adapters disabled."""

    model: Any
    head: LogprobHead  # wraps the output layer of `model`
    adapters: Adapters | None = None
    is_partitioned: bool = False  # over the ranks (ZeRO-3): passes are collective
    group: SequenceGroup | None = None  # over which they are collective, too

    def logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """TRL's `ref_per_token_logps` [B, T] of `batch`, 0 at padding: of the whole distribution, as TRL's are.

        If memory runs out, the halves of the batch are tried one after the other, unless passes are collective.
        """
        try:
            return self._logprobs(batch, temperature)
        except torch.OutOfMemoryError:
            if self.is_partitioned or self.group is not None or batch.num_sequences == 1:
                raise
        # Here, and not above: until its handler ends, the exception holds the tensors of the pass that failed.
        logger.warning("the reference model ran out of memory on %d tokens; trying halves", batch.num_tokens)
        torch.cuda.empty_cache()
        return torch.cat([self.logprobs(half, temperature) for half in batch.halves()])

    @torch.no_grad()
    def follow(self, policy: nn.Module, alpha: float) -> None:
        """Mix the policy's weights in: alpha x policy + (1 - alpha) x reference (TR-DPO, arXiv:2404.09656).

        Collective under ZeRO-3.
        """
        for own, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            with _whole([theirs]), _whole([own], modifier_rank=0):
                own.data.mul_(1.0 - alpha).add_(theirs.data, alpha=alpha)

    def weights(self) -> Export:
        """Its weights under the checkpoint's names."""
        names = CheckpointNames(self._module)
        return Export(full(self._module), is_partitioned=self.is_partitioned, group=names.group)

    def save_config(self, folder: Path) -> None:
        """Write what `frozen_copy` needs beside the weights; any thread may do it."""
        save_config(self._module, folder)

    @property
    def _module(self) -> Any:
        return self.model.module if self.is_partitioned else self.model

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        # Its routers choose by themselves: the experts are those of the policy.
        own = replace(batch, experts_NLX=None)
        with self.adapters.disabled() if self.adapters else nullcontext():
            return self.head.per_token(self.model, own, temperature).logprobs_BT


def frozen_copy(
    config: TrainerConfig,
    device: torch.device,
    *,
    ds_config: dict[str, Any],
    buffers: dict[str, Tensor],
    folder: Path | None = None,
    group: SequenceGroup | None = None,
) -> Reference:
    """Load the initial model once more, partitioned over the ranks under ZeRO-3; collective.

    Args:
        config: the job's configuration.
        device: where the model goes.
        ds_config: DeepSpeed's configuration of the policy.
        buffers: the model's buffers as loaded, which DeepSpeed would cast.
        folder: a reference model of a checkpoint, to be loaded in place of the initial model.
        group: ranks that share each sequence.
    """
    if folder is not None:
        saved = config.model.model_copy(update={"name": None, "revision": None, "path": str(folder)})
        config = config.model_copy(update={"model": saved})
    model = load_model(config, device).requires_grad_(False).eval()
    head = LogprobHead(model, group=group)
    if config.parallelism.zero_stage < 3:
        return Reference(model.to(device), head, group=group)
    keep = {key: ds_config[key] for key in ("train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16")}
    keep["zero_optimization"] = {"stage": 3}
    deepspeed_engine = deepspeed.initialize(model=model, config=keep)[0]
    deepspeed_engine.eval()
    restore_buffers(deepspeed_engine.module, buffers, device)
    return Reference(deepspeed_engine, head, is_partitioned=True, group=group)


def _whole(parameters: list[Any], modifier_rank: int | None = None) -> Any:
    """Gather parameters that ZeRO-3 keeps in parts; what the rank `modifier_rank` changes in them stays."""
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)
