"""Who trains on what: samples spread over the ranks by their tokens, in equally many micro-batches on every rank.

A pure function of what all ranks know, so that all come to the same answer without a word. Samples that would change nothing are left out:
those outside of the loss, and those whose advantage is 0 where no KL term pulls at them either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_workload.batching import FILLER_TOKENS, MicroBatch, filler, micro_batch, pack
from grpo_workload.collectives import gather
from grpo_workload.config import TrainingConfig
from grpo_workload.loss import LossScale
from grpo_workload.types import Sample

TOLERANCE = 0.02
"""Of the mean: ranks whose tokens differ by less are left alone, since moving a sample costs, too."""


class Fact(NamedTuple):
    """What every rank knows of a completion of the step."""

    prompt_tokens: int
    tokens: int  # of the completion
    is_truncated: bool
    reward: float
    advantage: float


class Piece(NamedTuple):
    """A sample by the rank that has it and its place there."""

    owner: int
    place: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's training."""

    scale: LossScale  # of the whole step, samples that change nothing included
    bins: list[list[list[Piece]]]  # by rank and micro-batch

    @property
    def num_micro_batches(self) -> int:
        """On every rank: where samples do not reach, fillers do."""
        return max(1, *(len(own) for own in self.bins))

    def trained_tokens(self, rank: int) -> int:
        """Of the samples that `rank` trains on."""
        return sum(piece.tokens for pieces in self.bins[rank] for piece in pieces)

    def fed_tokens(self, rank: int) -> int:
        """The same with fillers."""
        return self.trained_tokens(rank) + FILLER_TOKENS * (self.num_micro_batches - len(self.bins[rank]))


def plan(facts: Sequence[Sequence[Fact]], training: TrainingConfig) -> Plan:
    """The plan for completions `facts[rank][index]`."""
    num_tokens = sum(fact.tokens for own in facts for fact in own if _in_loss(fact, training))
    shares = spread(
        [
            [
                Piece(rank, place, fact.prompt_tokens + fact.tokens)
                for place, fact in enumerate(own)
                if _in_loss(fact, training) and (fact.advantage != 0 or training.beta > 0)
            ]
            for rank, own in enumerate(facts)
        ]
    )
    scale = LossScale(num_sequences=sum(len(own) for own in facts), num_tokens=num_tokens)
    return Plan(scale=scale, bins=[_pack(share, training) for share in shares])


def spread(shares: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """`shares` after the ranks with the most tokens gave to those with the fewest, until giving no longer helps."""
    result = [list(share) for share in shares]
    loads = [sum(piece.tokens for piece in share) for share in result]
    while True:
        rich, poor = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[rich] - loads[poor]
        # Each move brings two loads closer together, so that this ends.
        smaller = [piece for piece in result[rich] if piece.tokens < gap]
        if gap <= TOLERANCE * sum(loads) / len(loads) or not smaller:
            return result
        piece = min(smaller, key=lambda piece: abs(2 * piece.tokens - gap))
        result[rich].remove(piece)
        result[poor].append(piece)
        loads[rich] -= piece.tokens
        loads[poor] += piece.tokens


def micro_batches(plan: Plan, samples: Sequence[Sample], rank: int) -> Iterator[MicroBatch]:
    """The micro-batches of `rank`, whose own samples are `samples`, each made when it is asked for; collective when samples move."""
    received = _exchange(plan, samples, rank)
    for pieces in plan.bins[rank]:
        yield micro_batch([samples[piece.place] if piece.owner == rank else received[piece.owner, piece.place] for piece in pieces])
    yield from (filler() for _ in range(plan.num_micro_batches - len(plan.bins[rank])))


def _exchange(plan: Plan, samples: Sequence[Sample], rank: int) -> dict[tuple[int, int], Sample]:
    moving = [piece for owner, bins in enumerate(plan.bins) for pieces in bins for piece in pieces if piece.owner != owner]
    if not moving:
        return {}
    own = {(rank, piece.place): samples[piece.place].bare() for piece in moving if piece.owner == rank}
    return {place: sample for part in gather(own) for place, sample in part.items()}


def _pack(share: Sequence[Piece], training: TrainingConfig) -> list[list[Piece]]:
    max_sequences = training.per_device_train_batch_size or max(1, len(share))
    bins = pack([piece.tokens for piece in share], max_tokens=training.max_tokens_per_micro_batch, max_sequences=max_sequences)
    return [[share[index] for index in indices] for indices in bins]


def _in_loss(fact: Fact, training: TrainingConfig) -> bool:
    return not math.isnan(fact.reward) and not (fact.is_truncated and training.mask_truncated_completions)
