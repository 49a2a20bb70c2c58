"""Chooses the engine for the next prompt: the one with the fewest of this rank's samples in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_workload.spec.contract import Engine

# Limit for one rank on one data-parallel copy: vLLM's default number of sequences in a batch. Further prompts wait here
# for the engine that is free first.
SAMPLES_IN_FLIGHT = 256


@dataclass(slots=True)
class Lane:
    """One engine and its load."""

    engine: Engine
    in_flight: int = 0  # number of this rank's samples that the engine is generating


def choose(lanes: Sequence[Lane], num_samples: int, first: int) -> Lane | None:
    """Return the lane with room that has the fewest samples in flight for each copy; None when all lanes are full.

    Among equals it is the next one from position `first` on. An idle lane has room for any number of samples.
    """
    turn = [lanes[(first + index) % len(lanes)] for index in range(len(lanes))]
    free = [
        lane
        for lane in turn
        if lane.in_flight == 0 or lane.in_flight + num_samples <= SAMPLES_IN_FLIGHT * lane.engine.data_parallel
    ]
    return min(free, key=lambda lane: lane.in_flight / lane.engine.data_parallel, default=None)


class Router:
    """Assigns prompts to lanes; for use in one event loop."""

    def __init__(self, engines: Sequence[Engine], *, first: int) -> None:
        """`first` breaks ties, so that ranks with one prompt each do not all start with the same engine."""
        self._lanes = [Lane(engine) for engine in engines]
        self._first = first
        self._freed = asyncio.Event()

    async def acquire(self, num_samples: int) -> Lane | None:
        """Wait for a lane with room and book `num_samples` on it; None when all lanes are closed."""
        while self._lanes:
            if lane := choose(self._lanes, num_samples, self._first):
                lane.in_flight += num_samples
                return lane
            self._freed.clear()
            await self._freed.wait()
        return None

    def release(self, lane: Lane, num_samples: int) -> None:
        """Give back the samples that `acquire` booked."""
        lane.in_flight -= num_samples
        self._freed.set()

    def close(self, lane: Lane) -> None:
        """Stop using this lane."""
        if lane in self._lanes:
            self._lanes.remove(lane)
        self._freed.set()
