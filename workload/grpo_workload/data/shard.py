"""A rank's share of prompts."""

from __future__ import annotations


def shard(num_prompts: int, world_size: int, rank: int) -> range:
    """Positions of the prompts that `rank` samples: contiguous shares; sizes differ by at most one, larger ones first.

    With fewer prompts than ranks, the last ranks have none: they train on samples of the others.
    """
    assert 0 <= rank < world_size
    share, larger = divmod(num_prompts, world_size)
    start = rank * share + min(rank, larger)
    return range(start, start + share + (rank < larger))
