"""How long a step takes, and each part of it."""

from __future__ import annotations

import time


class Clock:
    """Seconds since it was made, and those of the parts between."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._start

    def lap(self, name: str) -> None:
        """End a part, or another piece of the part, `name`."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
