"""Memory of a GPU that stays free beside an engine that takes what the trainer leaves."""

from __future__ import annotations

from grpo_workload.weights.export import GATHER_BYTES

SPARE = 0.08
"""Share of a GPU that fragments may take. A plan that leaves less fits, but tightly, and is never proposed."""

COMMUNICATOR = int(0.8 * 2**30)
"""Bytes of one communicator of NCCL (docs/memory.md)."""


def gather_buckets(largest: int, *, is_partitioned: bool) -> int:
    """Return the bytes of the two buckets of an export whose largest weight has so many; ZeRO-3 gathers into them."""
    return 2 * max(GATHER_BYTES if is_partitioned else 0, largest)


def reserve(total: int, buckets: int) -> int:
    """Return the bytes that stay free of a GPU of `total`: checkpoints take `buckets` while the cache is there."""
    return int(SPARE * total) + buckets
