"""What stays free of a GPU beside an engine that takes what the trainer leaves."""

from __future__ import annotations

SPARE = 0.08
"""Share of a GPU that fragments may take. A plan that leaves less fits, but tightly, and is never proposed."""


def reserve(total: int, buckets: int) -> int:
    """Return the bytes that stay free of a GPU of `total`: checkpoints take `buckets` while the cache is there."""
    return int(SPARE * total) + buckets
