"""Elastic engines that answer but could not take part in a push: left out for a while, each time twice as long. Pure.

Every rank has its own clock, so one may leave an engine out a moment longer than another. An elastic engine counts only
if all ranks see it, so they still agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.roster import Observation, Processes

LONGEST = 3600.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aside:
    process: str
    why: EngineError
    seconds: float  # for which it is left out
    until: float  # time at which it is tried again
    is_there: bool = True  # whether it was seen last time


class SetAside:
    """The engines that one rank leaves out."""

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`first`: seconds until an engine is tried again for the first time."""
        self._first, self._clock = first, clock
        self._engines: dict[str, _Aside] = {}

    def add(self, process: str, why: EngineError) -> float:
        """Leave out this process of the engine that `why` names; return the seconds until it is tried again."""
        old = self._engines.get(why.engine.name)
        again = old is not None and old.process == process
        seconds = min(2 * old.seconds, LONGEST) if old is not None and again else self._first
        self._engines[why.engine.name] = _Aside(
            process=process, why=why, seconds=seconds, until=self._clock() + seconds
        )
        return seconds

    def joined(self, processes: Processes) -> None:
        """Note that these processes have got weights."""
        for name in processes.keys() & self._engines.keys():
            del self._engines[name]

    def rest(self, observation: Observation) -> Observation:
        """Return what was observed without the engines that are left out now. A new process is tried at once."""
        seen = observation.processes
        for name, one in list(self._engines.items()):
            if seen.get(name, one.process) != one.process:
                del self._engines[name]
            else:
                self._engines[name] = replace(one, is_there=name in seen)
        out = {name for name, one in self._engines.items() if self._clock() < one.until}
        return replace(observation, processes={name: process for name, process in seen.items() if name not in out})

    def reasons(self) -> list[str]:
        """Return why each engine that is there is left out."""
        return [
            f"{one.why}; it gets no weights and no prompts, and is tried again every {one.seconds:g} s"
            for one in self._engines.values()
            if one.is_there
        ]
