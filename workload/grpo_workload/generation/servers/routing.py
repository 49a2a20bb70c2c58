"""Chooses the engine for the next prompt: the one with the fewest of this rank's samples in flight."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_spec.contract import Engine

# Limit for one rank on one data-parallel copy, for each step whose completions are sampled at a time: vLLM's default
# number of sequences in a batch. Further prompts wait here for the engine that is free first.
SAMPLES_IN_FLIGHT = 256


@dataclass(slots=True)
class Lane:
    """One process of an engine and its load."""

    engine: Engine
    process: str = ""
    in_flight: int = 0  # number of this rank's samples that the engine is generating


def choose(lanes: Sequence[Lane], num_samples: int, first: int, *, limit: int = SAMPLES_IN_FLIGHT) -> Lane | None:
    """Return the lane with room that has the fewest samples in flight for each copy; None when no lane has room.

    `limit` is the largest number of samples in flight for each copy. Among equals it is the next one from position
    `first` on. An idle lane has room for any number of samples.
    """
    turn = [lanes[(first + index) % len(lanes)] for index in range(len(lanes))]
    free = [
        lane
        for lane in turn
        if lane.in_flight == 0 or lane.in_flight + num_samples <= limit * lane.engine.data_parallel
    ]
    return min(free, key=lambda lane: lane.in_flight / lane.engine.data_parallel, default=None)


class Idle:
    """Measures for how long nothing is in flight, by `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._in_flight, self._since, self._seconds = 0, clock(), 0.0

    def add(self, number: int) -> None:
        """Note that so many more are in flight; fewer if it is negative."""
        with self._lock:
            self._settle()
            self._in_flight += number

    def take(self) -> float:
        """Return the seconds since the last call in which nothing was in flight."""
        with self._lock:
            self._settle()
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _settle(self) -> None:
        now = self._clock()
        if not self._in_flight:
            self._seconds += now - self._since
        self._since = now


class Router:
    """Assigns prompts to lanes; for use in one event loop."""

    def __init__(self, *, first: int, steps: int = 1) -> None:
        """`first` breaks ties, so that ranks with one prompt each do not all start with the same engine.

        `steps`: number of steps whose completions are sampled at a time.
        """
        self._lanes: list[Lane] = []
        self._limit = SAMPLES_IN_FLIGHT * steps
        self._first = first
        self._changed = asyncio.Event()
        self.idle = Idle()
        self.deserted = asyncio.Event()
        """Set while no lane is open."""
        self.deserted.set()

    def use(self, engines: Mapping[str, Engine], processes: Mapping[str, str]) -> None:
        """Use these engines and processes, by the engine's name, and no others. A lane that stays keeps its load."""
        old = {(lane.engine.name, lane.process): lane for lane in self._lanes}
        self._lanes = [
            old.get((name, processes[name])) or Lane(engine, processes[name])
            for name, engine in engines.items()
            if name in processes
        ]
        self._note()

    async def acquire(self, num_samples: int) -> Lane:
        """Wait for a lane with room, and book `num_samples` on it."""
        while (lane := choose(self._lanes, num_samples, self._first, limit=self._limit)) is None:
            self._changed.clear()
            await self._changed.wait()
        lane.in_flight += num_samples
        self.idle.add(num_samples)
        return lane

    def release(self, lane: Lane, num_samples: int) -> None:
        """Give back the samples that `acquire` booked."""
        lane.in_flight -= num_samples
        self.idle.add(-num_samples)
        self._changed.set()

    def close(self, lane: Lane) -> None:
        """Stop using this lane."""
        if lane in self._lanes:
            self._lanes.remove(lane)
        self._note()

    def _note(self) -> None:
        self._changed.set()
        if self._lanes:
            self.deserted.clear()
        else:
            self.deserted.set()
