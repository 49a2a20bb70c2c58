"""A rank's micro-batches of a step: its own samples, and those that a plan moves to it from other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_workload.algorithm.micro_batch import MicroBatch, filler, micro_batch
from grpo_workload.algorithm.samples import Sample
from grpo_workload.algorithm.step_plan import Plan
from grpo_workload.ranks.collectives import gather


def micro_batches(plan: Plan, samples: Sequence[Sample], rank: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of `rank`, whose own samples are `samples`; collective if samples move between ranks."""
    received = _exchange(plan, samples, rank)
    for pieces in plan.bins[rank]:
        yield micro_batch(
            [
                (samples[piece.place] if piece.owner == rank else received[piece.owner, piece.place]).sequence(
                    piece.sequence
                )
                for piece in pieces
            ],
            [piece.shared for piece in pieces],
        )
    yield from (filler() for _ in range(plan.num_micro_batches - len(plan.bins[rank])))


def _exchange(plan: Plan, samples: Sequence[Sample], rank: int) -> dict[tuple[int, int], Sample]:
    moving = [
        piece for owner, bins in enumerate(plan.bins) for pieces in bins for piece in pieces if piece.owner != owner
    ]
    if not moving:
        return {}
    own = {(rank, piece.place): samples[piece.place].bare() for piece in moving if piece.owner == rank}
    return {place: sample for part in gather(own) for place, sample in part.items()}
