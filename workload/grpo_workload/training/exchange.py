"""A rank's micro-batches of a step: its own samples, and those that a plan moves to it from other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from grpo_workload.algorithm.micro_batch import MicroBatch, filler, micro_batch
from grpo_workload.algorithm.pieces import Piece
from grpo_workload.algorithm.samples import Sample
from grpo_workload.algorithm.step_plan import Plan
from grpo_workload.ranks.collectives import gather
from grpo_workload.ranks.sequence_group import SequenceGroup


def micro_batches(
    plan: Plan, samples: Sequence[Sample], rank: int, group: SequenceGroup | None = None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of `rank`, whose own samples are `samples`; collective if samples move between ranks.

    All ranks of a sequence group yield the same.
    """
    own = rank // plan.sequence
    received = _exchange(plan, samples, rank, group)
    for pieces in plan.bins[own]:
        yield micro_batch(
            [
                (samples[piece.place] if piece.owner == rank else received[piece.owner, piece.place]).sequence(
                    piece.sequence
                )
                for piece in pieces
            ],
            [piece.shared for piece in pieces],
        )
    yield from (filler() for _ in range(plan.num_micro_batches - len(plan.bins[own])))


def _exchange(
    plan: Plan, samples: Sequence[Sample], rank: int, group: SequenceGroup | None
) -> dict[tuple[int, int], Sample]:
    """Return the samples of other ranks: those that move between groups from all, others from the rank's own group."""
    staying: list[Piece] = []
    moving: list[Piece] = []
    for number, bins in enumerate(plan.bins):
        for piece in (piece for pieces in bins for piece in pieces):
            (staying if piece.owner // plan.sequence == number else moving).append(piece)

    def sent(pieces: Iterable[Piece]) -> dict[tuple[int, int], Sample]:
        return {(rank, piece.place): samples[piece.place].bare() for piece in pieces if piece.owner == rank}

    parts = gather(sent(moving)) if moving else []
    if group is not None:
        parts += gather(sent(staying), group.handle)
    return {place: sample for part in parts for place, sample in part.items()}
