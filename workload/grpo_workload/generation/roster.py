"""Which process of each engine is in the transfer group, and which holds the current weights. Pure, and the same on every rank.

Each start of an engine is another process, with a name of its own. One that was not in the last push that went through holds other weights,
whatever its address and whatever version it tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_workload.contract import Engine

Processes = Mapping[str, str]
"""Names of processes, by engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What one rank sees of its engines."""

    processes: Processes  # of those that are well
    ill: Engine | None = None  # the first that is not
    trouble: str | None = None  # what is wrong with it


def agreed(sights: Sequence[Sight]) -> Processes | None:
    """The processes of all engines, or None while an engine is ill on some rank, or two ranks have seen different processes of one."""
    seen: dict[str, str] = {}
    for sight in sights:
        if sight.ill is not None or any(seen.get(engine, process) != process for engine, process in sight.processes.items()):
            return None
        seen |= sight.processes
    return seen


def is_lost(known: Processes, sights: Sequence[Sight]) -> bool:
    """Whether an engine is ill on some rank, or is another process than the `known` one."""
    return any(
        sight.ill is not None or any(known.get(engine) != process for engine, process in sight.processes.items()) for sight in sights
    )


@dataclass(slots=True)
class Roster:
    """What was joined and pushed to. `generation` counts the groups that were begun, so that none is taken for another."""

    group: Processes = field(default_factory=dict)  # empty: there is no group that works
    current: Processes = field(default_factory=dict)
    generation: int = 0

    def begin_group(self) -> int:
        """The number of the group that is built next; the old one is given up."""
        self.group = {}
        self.generation += 1
        return self.generation

    def joined(self, processes: Processes) -> None:
        """The group works."""
        self.group = dict(processes)

    def begin_push(self) -> None:
        """From here on no engine is known to hold any weights."""
        assert self.group, "a push needs a group"
        self.current = {}

    def pushed(self) -> None:
        """All of the group hold the current weights."""
        self.current = dict(self.group)

    def failed(self) -> None:
        """A push or a join failed: engines may hold parts of the weights, and the group is of no use."""
        self.group = {}
        self.current = {}
