"""The part of a micro-batch that one rank of a sequence group is fed: a contiguous share of its tokens. Pure.

Shapes: N tokens of the micro-batch, K its completion tokens, P those of them whose places are in the part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from grpo_workload.algorithm.micro_batch import MicroBatch


def shares(count: int, size: int) -> list[int]:
    """Divide `count` into `size` numbers that differ by at most one, larger ones first."""
    return [count // size + (place < count % size) for place in range(size)]


def spans(count: int, size: int) -> list[slice]:
    """Return the contiguous parts of `shares`."""
    return [slice(*edges) for edges in pairwise(accumulate(shares(count, size), initial=0))]


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A rank's part of a micro-batch: tokens that it is fed, and completion tokens that it computes."""

    batch: MicroBatch  # the whole, with a token for each rank
    own: slice  # in N
    own_P: Tensor  # indexes in K
    places_P: Tensor  # `MicroBatch.places_K` in the part; one place at least, so that each rank has a backward pass
    targets_P: Tensor

    @staticmethod
    def of(batch: MicroBatch, place: int, size: int) -> SequencePart:
        """Return the part of the rank at `place` in a group of `size`."""
        batch = _with_tokens(batch, size)
        own = spans(batch.num_tokens, size)[place]
        own_P = ((batch.places_K >= own.start) & (batch.places_K < own.stop)).nonzero().squeeze(1)
        places_P, targets_P = batch.places_K[own_P] - own.start, batch.targets_K[own_P]
        if not len(own_P):
            places_P, targets_P = batch.places_K.new_zeros(1), batch.targets_K.new_zeros(1)
        return SequencePart(batch, own, own_P, places_P, targets_P)

    @property
    def experts(self) -> Tensor | None:
        """`MicroBatch.experts_NLX` of the rank's tokens."""
        return None if self.batch.experts_NLX is None else self.batch.experts_NLX[self.own]

    def model_inputs(self) -> dict[str, object]:
        """`MicroBatch.model_inputs` with the rank's tokens; bounds of sequences are those of the whole micro-batch."""
        ids, positions = (one[:, self.own] for one in (self.batch.input_ids_1N, self.batch.position_ids_1N))
        return self.batch.model_inputs() | {"input_ids": ids, "position_ids": positions}


def _with_tokens(batch: MicroBatch, count: int) -> MicroBatch:
    """Return `batch` with at least `count` tokens: others are a sequence of their own, of which nothing is asked."""
    missing = count - batch.num_tokens
    if missing <= 0:
        return batch
    batch = batch.apart()
    more, experts_NLX = batch.input_ids_1N.new_zeros(1, missing), batch.experts_NLX
    if experts_NLX is not None:
        experts_NLX = torch.cat([experts_NLX, experts_NLX.new_full((missing, *experts_NLX.shape[1:]), -1)])
    return replace(
        batch,
        input_ids_1N=torch.cat([batch.input_ids_1N, more], dim=1),
        position_ids_1N=torch.cat([batch.position_ids_1N, torch.arange(missing, device=more.device)[None]], dim=1),
        cu_seq_lens=torch.cat([batch.cu_seq_lens, batch.cu_seq_lens[-1:] + missing]),
        max_length=max(batch.max_length, missing),
        experts_NLX=experts_NLX,
    )
