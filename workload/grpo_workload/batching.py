"""Which rank takes which prompts, and samples as padded tensors.

Shapes: B sequences, P prompt tokens (left-padded), C completion tokens (right-padded), L = P + C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_workload.loss import LossScale
from grpo_workload.types import Sample


def shard(num_prompts: int, world_size: int, rank: int, *, allow_empty: bool = False) -> range:
    """Prompts of `rank`: contiguous shares whose sizes differ by at most one, the larger first. ValueError when a rank would get none."""
    raise NotImplementedError


def num_micro_batches(num_prompts: int, num_generations: int, world_size: int, size: int) -> int:
    """Micro-batches of a step on EVERY rank: what the rank with the largest share needs, so that collectives match."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Model inputs [B, L] and what the loss needs. Logits: `model(..., logits_to_keep=C + 1).logits[:, :-1]`."""

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    position_ids_BL: Tensor
    completion_ids_BC: Tensor
    mask_BC: Tensor  # float, 1 where a token is in the loss
    sampling_logprobs_BC: Tensor  # as the generator saw them, 0 at padding
    advantages_B: Tensor
    num_sequences: int  # real samples: 0 for a filler

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on `device`."""
        raise NotImplementedError


def micro_batches(
    samples: Sequence[Sample], size: int, pad_token_id: int, *, num_micro_batches: int, mask_truncated_completions: bool = False
) -> list[MicroBatch]:
    """Exactly `num_micro_batches` batches of at most `size` samples, long ones together; fillers of weight 0 where samples do not reach.

    Out of the loss (mask 0): samples with a NaN reward, and with `mask_truncated_completions` those cut by length.
    """
    raise NotImplementedError


def local_scale(batches: Sequence[MicroBatch]) -> LossScale:
    """This rank's share of the step's LossScale: add up both counts over ranks before use."""
    raise NotImplementedError
