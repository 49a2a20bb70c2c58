"""Process items of known sizes in buckets of bounded size. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def cut(items: Iterable[T], max_bytes: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield `items` in lists of at most `max_bytes` bytes; a larger item gets a list to itself."""
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
    """Yield `items` in order, while a thread produces the next item. The thread starts with the first item at once.

    Args:
        items: advanced on that thread only. On exit, waits for the item in production and leaves the rest.
        prepare: called on that thread before anything else.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead", initializer=prepare) as thread:
        first = thread.submit(next, items, end)

        def take() -> Iterator[T]:
            pending = first
            while (item := pending.result()) is not end:
                pending = thread.submit(next, items, end)
                yield item  # type: ignore[misc]  # not the end

        yield take()
