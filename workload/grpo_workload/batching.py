"""Which rank samples which prompts, and samples as micro-batches: sequences one behind the other, without padding.

Shapes: N tokens of all sequences of a micro-batch, B sequences, C completion tokens of the longest (right-padded: scalars alone, which
the model does not see), K completion tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from grpo_workload.types import Completion, Prompt, Sample


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


def pack(lengths: Sequence[int], *, max_tokens: int, max_sequences: int) -> list[list[int]]:
    """Sequences of these lengths in as few bins as first fit finds (Johnson 1973), the longest first; indices into `lengths`.

    A bin holds at most `max_tokens` and `max_sequences`; a sequence that is longer than `max_tokens` has one of its own. The fullest comes
    first, so that memory runs out early or never.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        fits = (place for place, left in enumerate(room) if lengths[index] <= left and len(bins[place]) < max_sequences)
        place = next(fits, None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(index)
        room[place] -= lengths[index]
    return [bins[place] for place in sorted(range(len(bins)), key=lambda place: room[place])]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a model reads, and what the loss needs."""

    input_ids_1N: Tensor
    position_ids_1N: Tensor  # from 0 in each sequence
    cu_seq_lens: Tensor  # int32 [B + 1]: where each sequence begins, and N
    max_length: int  # tokens of the longest sequence
    places_K: Tensor  # the tokens whose next one is a completion's
    targets_K: Tensor  # those next ones
    mask_BC: Tensor  # float32, 1 where a token is in the loss
    is_token_BC: Tensor  # bool, K of them
    sampling_logprobs_BC: Tensor  # as the generator saw them, 0 at padding
    advantages_B: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that the model is fed."""
        return self.input_ids_1N.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on `device`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "max_length"}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def model_inputs(self) -> dict[str, object]:
        """Arguments of a transformers model: attention functions find sequences by their bounds, or by positions that begin anew."""
        bounds = {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
        longest = {"max_length_q": self.max_length, "max_length_k": self.max_length}
        return {"input_ids": self.input_ids_1N, "position_ids": self.position_ids_1N, "use_cache": False, **bounds, **longest}

    def rows(self, values_K: Tensor) -> Tensor:
        """Values of completion tokens [K] as [B, C], 0 at padding; differentiable."""
        return values_K.new_zeros(self.is_token_BC.shape).masked_scatter(self.is_token_BC, values_K)


def micro_batch(samples: Sequence[Sample]) -> MicroBatch:
    """One micro-batch of `samples`."""
    sequences = [(*sample.prompt.token_ids, *sample.completion.token_ids) for sample in samples]
    starts = list(accumulate((len(ids) for ids in sequences), initial=0))
    completions = [sample.completion for sample in samples]
    spans = [range(end - len(completion.token_ids) - 1, end - 1) for end, completion in zip(starts[1:], completions, strict=True)]
    mask_BC = _pad([torch.ones(len(completion.token_ids)) for completion in completions])
    return MicroBatch(
        input_ids_1N=torch.tensor([[token for ids in sequences for token in ids]]),
        position_ids_1N=torch.cat([torch.arange(len(ids)) for ids in sequences]).unsqueeze(0),
        cu_seq_lens=torch.tensor(starts, dtype=torch.int32),
        max_length=max(len(ids) for ids in sequences),
        places_K=torch.tensor([place for span in spans for place in span]),
        targets_K=torch.tensor([token for completion in completions for token in completion.token_ids]),
        mask_BC=mask_BC,
        is_token_BC=mask_BC.bool(),
        sampling_logprobs_BC=_pad([torch.tensor(completion.logprobs, dtype=torch.float32) for completion in completions]),
        advantages_B=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
    )


FILLER_TOKENS = 2


def filler() -> MicroBatch:
    """`FILLER_TOKENS` of weight 0, for a rank that has nothing to do while others do: collectives of the backward pass must match."""
    answer = Completion(token_ids=(0,), logprobs=(0.0,), text="", finish_reason="stop", weight_version=0)
    batch = micro_batch([Sample(prompt=Prompt(index=-1, text="", token_ids=(0,)), completion=answer, reward=0.0, advantage=0.0)])
    return replace(batch, mask_BC=torch.zeros_like(batch.mask_BC))


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
