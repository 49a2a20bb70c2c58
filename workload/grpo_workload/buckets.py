"""Many things with a size, a bounded amount at a time. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def cut(items: Iterable[T], max_bytes: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """`items` in lists of at most `max_bytes` bytes, or of one item that is larger."""
    bucket: list[T] = []
    size = 0
    for item in items:
        num_bytes = size_of(item)
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += num_bytes
    if bucket:
        yield bucket
