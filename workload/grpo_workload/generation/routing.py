"""Which engine gets the next prompt: the one with the least in flight, as far as this rank knows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_workload.contract import Engine

# Of one data parallel copy, for one rank: vLLM's default for the sequences of a batch. More waits here, for whoever is free first.
SAMPLES_IN_FLIGHT = 256


@dataclass(slots=True)
class Lane:
    """One engine as a rank sees it."""

    engine: Engine
    in_flight: int = 0  # samples of this rank


def choose(lanes: Sequence[Lane], num_samples: int, first: int) -> Lane | None:
    """The lane with the least in flight for its copies that has room, the next from `first` on among equals; None when all are full.

    An idle lane has room for any number.
    """
    turn = [lanes[(first + index) % len(lanes)] for index in range(len(lanes))]
    free = [lane for lane in turn if lane.in_flight == 0 or lane.in_flight + num_samples <= SAMPLES_IN_FLIGHT * lane.engine.data_parallel]
    return min(free, key=lambda lane: lane.in_flight / lane.engine.data_parallel, default=None)


class Router:
    """Gives out lanes; for one event loop."""

    def __init__(self, engines: Sequence[Engine], *, first: int) -> None:
        """`first` breaks ties, so that ranks with one prompt each do not all begin with the same engine."""
        self._lanes = [Lane(engine) for engine in engines]
        self._first = first
        self._freed = asyncio.Event()

    async def acquire(self, num_samples: int) -> Lane | None:
        """Wait for a lane and book `num_samples` on it; None when all lanes were closed."""
        while self._lanes:
            if lane := choose(self._lanes, num_samples, self._first):
                lane.in_flight += num_samples
                return lane
            self._freed.clear()
            await self._freed.wait()
        return None

    def release(self, lane: Lane, num_samples: int) -> None:
        """Give back what was booked."""
        lane.in_flight -= num_samples
        self._freed.set()

    def close(self, lane: Lane) -> None:
        """Give out this lane no more."""
        if lane in self._lanes:
            self._lanes.remove(lane)
        self._freed.set()
