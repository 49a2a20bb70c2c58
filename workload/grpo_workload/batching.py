"""Which rank takes which prompts, and samples as padded tensors.

Shapes: B sequences, P prompt tokens (left-padded), C completion tokens (right-padded), L = P + C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo_workload.loss import LossScale
from grpo_workload.types import Sample


def shard(num_prompts: int, world_size: int, rank: int, *, allow_empty: bool = False) -> range:
    """Prompts of `rank`: contiguous shares whose sizes differ by at most one, the larger first. ValueError when a rank would get none."""
    assert 0 <= rank < world_size
    if num_prompts < world_size and not allow_empty:
        raise ValueError(
            f"training.promptsPerStep: {num_prompts} prompts over {world_size} ranks leave ranks {num_prompts}-{world_size - 1} "
            f"without work; use at least {world_size} prompts a step, or fewer ranks"
        )
    share, larger = divmod(num_prompts, world_size)
    start = rank * share + min(rank, larger)
    return range(start, start + share + (rank < larger))


def num_micro_batches(num_prompts: int, num_generations: int, world_size: int, size: int) -> int:
    """Micro-batches of a step on EVERY rank: what the rank with the largest share (rank 0) needs, so that collectives match."""
    return math.ceil(len(shard(num_prompts, world_size, 0, allow_empty=True)) * num_generations / size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Model inputs [B, L] and what the loss needs. Logits: `model(..., logits_to_keep=C + 1).logits[:, :-1]`."""

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    position_ids_BL: Tensor
    completion_ids_BC: Tensor
    mask_BC: Tensor  # float32, 1 where a token is in the loss
    sampling_logprobs_BC: Tensor  # as the generator saw them, 0 at padding
    advantages_B: Tensor
    num_sequences: int  # real samples: 0 for a filler

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on `device`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "num_sequences"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def micro_batches(
    samples: Sequence[Sample], size: int, pad_token_id: int, *, num_micro_batches: int, mask_truncated_completions: bool = False
) -> list[MicroBatch]:
    """Exactly `num_micro_batches` batches of at most `size` samples, long ones together; fillers of weight 0 where samples do not reach.

    Out of the loss (mask 0): samples with a NaN reward, and with `mask_truncated_completions` those cut by length.
    """
    assert len(samples) <= num_micro_batches * size, f"{len(samples)} samples do not fit {num_micro_batches} micro-batches of {size}"
    # Padding costs compute, so samples of like length share a batch; the longest come first, so that memory runs out early or never.
    ordered = sorted(samples, key=lambda sample: (len(sample.completion.token_ids), len(sample.prompt.token_ids)), reverse=True)
    chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    batches = [_collate(chunk, pad_token_id, mask_truncated_completions) for chunk in chunks]
    return batches + [_filler(pad_token_id)] * (num_micro_batches - len(batches))


def local_scale(batches: Sequence[MicroBatch]) -> LossScale:
    """Share of these batches (a rank's) in the step's LossScale: add up both counts over ranks before use."""
    num_tokens = sum(int(batch.mask_BC.sum()) for batch in batches)
    return LossScale(num_sequences=sum(batch.num_sequences for batch in batches), num_tokens=num_tokens)


def _collate(samples: Sequence[Sample], pad_token_id: int, mask_truncated_completions: bool) -> MicroBatch:
    prompts = [torch.tensor(sample.prompt.token_ids, dtype=torch.long) for sample in samples]
    completions = [torch.tensor(sample.completion.token_ids, dtype=torch.long) for sample in samples]
    logprobs = [torch.tensor(sample.completion.logprobs, dtype=torch.float32) for sample in samples]
    completion_mask_BC = _pad([torch.ones(len(ids)) for ids in completions], 0.0, "right")
    prompt_mask_BP = _pad([torch.ones(len(ids)) for ids in prompts], 0.0, "left")
    completion_ids_BC = _pad(completions, pad_token_id, "right")
    in_loss_B = torch.tensor([_in_loss(sample, mask_truncated_completions) for sample in samples], dtype=torch.float32)
    attention_mask_BL = torch.cat([prompt_mask_BP, completion_mask_BC], dim=1).long()
    return MicroBatch(
        input_ids_BL=torch.cat([_pad(prompts, pad_token_id, "left"), completion_ids_BC], dim=1),
        attention_mask_BL=attention_mask_BL,
        # Without these a model with absolute positions would see where the padding of its neighbours ends.
        position_ids_BL=(attention_mask_BL.cumsum(dim=1) - 1).clamp(min=0),
        completion_ids_BC=completion_ids_BC,
        mask_BC=completion_mask_BC * in_loss_B.unsqueeze(1),
        sampling_logprobs_BC=_pad(logprobs, 0.0, "right"),
        advantages_B=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        num_sequences=len(samples),
    )


def _in_loss(sample: Sample, mask_truncated_completions: bool) -> bool:
    truncated = sample.completion.finish_reason == "length"
    return not math.isnan(sample.reward) and not (truncated and mask_truncated_completions)


def _filler(pad_token_id: int) -> MicroBatch:
    """One sequence of two pad tokens, attended to (a row without any would make softmax NaN) but not in the loss."""
    ids_BL = torch.full((1, 2), pad_token_id)
    zeros_BC = torch.zeros(1, 1)
    return MicroBatch(
        input_ids_BL=ids_BL,
        attention_mask_BL=torch.ones_like(ids_BL),
        position_ids_BL=torch.arange(2).unsqueeze(0),
        completion_ids_BC=ids_BL[:, 1:],
        mask_BC=zeros_BC,
        sampling_logprobs_BC=zeros_BC,
        advantages_B=torch.zeros(1),
        num_sequences=0,
    )


def _pad(rows: list[Tensor], value: float, side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
