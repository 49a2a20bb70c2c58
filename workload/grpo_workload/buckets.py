"""Many things with a size, a bounded amount at a time. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


@contextmanager
def one_ahead(items: Iterator[T], prepare: Callable[[], None] | None = None) -> Iterator[Iterator[T]]:
    """Take `items` in order, while a thread makes the one after the one that is in use: the first at once.

    Args:
        items: made on that thread alone, the whole time; on leaving, the one that is being made is waited for, and the rest is left.
        prepare: called first on that thread.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead", initializer=prepare) as thread:
        first = thread.submit(next, items, end)

        def take() -> Iterator[T]:
            making = first
            while (item := making.result()) is not end:
                making = thread.submit(next, items, end)
                yield item  # type: ignore[misc]  # not the end

        yield take()
