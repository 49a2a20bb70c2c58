"""Watches what a sleeping engine keeps of the GPU beside torch: a leak there would end a long job, many steps later."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

GIB = 2**30
GROWTH = GIB // 5
"""Bytes more than in the first step from which on it is warned of."""


class AsleepWatch:
    """Compares steps with the first one. The engine sleeps once before it, while memory is tried, which allocates."""

    def __init__(self) -> None:
        self._seen = 0
        self._first = 0
        self._limit = 0

    def look(self) -> None:
        """Read what the driver counts as used and torch does not; called when the engine has gone to sleep."""
        free, total = torch.cuda.mem_get_info()
        self.note(total - free - torch.cuda.memory_reserved())

    def note(self, used: int) -> None:
        """Note the bytes of a sleep; warns each time that they have grown by another `GROWTH`."""
        self._seen += 1
        if self._seen <= 2:
            self._first, self._limit = used, used + GROWTH
        if used > self._limit:
            self._limit = used + GROWTH
            logger.warning(
                "beside torch, this rank holds %.2f GiB more of its GPU while vLLM sleeps than in its first step; if "
                "that goes on growing, training will run out of memory",
                (used - self._first) / GIB,
            )
