"""Says how long each part of an attempt takes until its first step is done, in the log of rank 0."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)


class StartLog:
    """Writes a line for each part. The first one begins with the process."""

    def __init__(self, rank: int) -> None:
        self._is_shown, self._last = rank == 0, 0.0

    def done(self, part: str) -> None:
        """Say that a part is done, which began when the one before was."""
        now = process_seconds()
        if self._is_shown:
            logger.info("start: %s took %.2f s; %.2f s since the process began", part, now - self._last, now)
        self._last = now


def process_seconds() -> float:
    """Return how long this process has been there, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # from the start of the machine
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
