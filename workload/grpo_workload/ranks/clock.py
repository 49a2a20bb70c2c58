"""Measures how long a step and each of its parts take."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the clock was created, and seconds spent in each named part."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._start

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the part `name`."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
