"""Says how long each part of an attempt takes until its first step is done, in the log of rank 0."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)


class StartLog:
    """Writes a line for each part. The first one begins with the rank's part of the attempt."""

    def __init__(self, rank: int, began: float) -> None:
        """`began`: when the first part began, in `machine_seconds`."""
        self._is_shown, self._began, self._last = rank == 0, began, 0.0

    def done(self, part: str) -> None:
        """Say that a part is done, which began when the one before was."""
        now = machine_seconds() - self._began
        if self._is_shown:
            logger.info("start: %s took %.2f s; %.2f s since the rank began", part, now - self._last, now)
        self._last = now


def machine_seconds() -> float:
    """Return the seconds since the start of the machine, which are the same in all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_start() -> float:
    """Return when this process was started, in `machine_seconds`, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # from the start of the machine
    return ticks / os.sysconf("SC_CLK_TCK")
