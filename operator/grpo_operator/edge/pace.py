"""When a status is written of which only details changed: how many pods are ready, for example.

Each such write costs the API server ten milliseconds, which pods that start at the same moment need more. So a job
writes them every few seconds, and all jobs together so many a second: where hundreds start at once, most jobs say
nothing between that they begin and that they run.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

DETAIL_SECONDS = 5.0
"""Seconds between two writes of one job's details at least."""

DETAILS_PER_SECOND = 2.0
"""Writes of details a second, of all jobs together: about a fortieth of one processor."""

K = TypeVar("K", bound=Hashable)


class Pace(Generic[K]):
    """Knows which jobs have details to write, and when each status was written last."""

    def __init__(self) -> None:
        self._written: dict[K, float] = {}
        self._waiting: set[K] = set()

    def wait(self, key: K, now: float) -> float:
        """Return the seconds until details of a job may be written, 0 or less if they may be now.

        Until `written` or `settled`, the job is one of those that wait, and delays the others.
        """
        self._waiting.add(key)
        pause = max(DETAIL_SECONDS, len(self._waiting) / DETAILS_PER_SECOND)
        return self._written.get(key, now - pause) + pause - now

    def written(self, key: K, now: float) -> None:
        """Note that the status of a job was written, with all details."""
        self._waiting.discard(key)
        self._written[key] = now

    def settled(self, key: K) -> None:
        """Note that the status of a job has all details."""
        self._waiting.discard(key)

    def forget(self, key: K) -> None:
        """Drop a job that no longer exists."""
        self._waiting.discard(key)
        self._written.pop(key, None)
