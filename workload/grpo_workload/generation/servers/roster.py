"""Tracks which processes of the engines are in the transfer group and hold the current weights. Equal on all ranks.

Each start of an engine is another process, with another name. A process that was not in the last completed push holds
other weights, whatever its address and whatever version it reports. An elastic engine is in a group if all ranks see
it when the group is built; it may be missing at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.errors import EngineError

Processes = Mapping[str, str]
"""Name of each engine's process, by engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One rank's sight of its engines."""

    processes: Processes  # processes of the healthy engines
    unhealthy: Engine | None = None  # the first engine that is not healthy, of those that are not elastic
    trouble: str | None = None  # what is wrong with that engine


def agreed(observations: Sequence[Observation], elastic: Collection[str] = ()) -> Processes | None:
    """Return the processes of the engines that can be used; None if one that ranks must wait for is among the others.

    That is, if a rank sees it unhealthy, or two ranks see different processes of it. Each rank observes the engines
    that it generates on: with Server all of them, so an `elastic` one counts only if every rank sees the same process.
    """
    seen: dict[str, set[str]] = {}
    for one in observations:
        for engine, process in one.processes.items():
            seen.setdefault(engine, set()).add(process)
    if any(one.unhealthy is not None for one in observations) or any(
        len(processes) > 1 for engine, processes in seen.items() if engine not in elastic
    ):
        return None
    return {
        engine: next(iter(processes))
        for engine, processes in seen.items()
        if engine not in elastic or (len(processes) == 1 and all(engine in one.processes for one in observations))
    }


def is_lost(known: Processes, observations: Sequence[Observation], elastic: Collection[str] = ()) -> bool:
    """Return whether some rank sees an unhealthy engine, or another process than the `known` one, or none of a known
    `elastic` engine. An elastic engine that is not known may be there.
    """

    def is_lost_to(one: Observation) -> bool:
        differs = any(
            known.get(engine) != process
            for engine, process in one.processes.items()
            if engine in known or engine not in elastic
        )
        misses = any(engine in known and engine not in one.processes for engine in elastic)
        return one.unhealthy is not None or differs or misses

    return any(map(is_lost_to, observations))


def absent(observations: Sequence[Observation], patience: float | None) -> RuntimeError:
    """Return why engines cannot be used; `patience` is the number of seconds waited for a lost one, if any."""
    for one in observations:
        if one.unhealthy is not None:
            waited = "" if patience is None else f"was lost and not healthy again within {patience:g} s: it "
            return EngineError(one.unhealthy, f"{waited}{one.trouble}")
    return RuntimeError(
        "ranks see different processes of the same engines: "
        + "; ".join(str(dict(one.processes)) for one in observations)
    )


@dataclass(slots=True)
class Roster:
    """The processes that joined the transfer group and that hold the current weights."""

    group: Processes = field(default_factory=dict)  # the joined processes; empty when no group works
    current: Processes = field(default_factory=dict)  # the processes that hold the current weights
    able: set[str] = field(default_factory=set)  # the processes that have shown that they can join a group

    def newcomers(self, processes: Processes, elastic: Collection[str]) -> list[str]:
        """Return which `elastic` engines of `processes` may be unable to join a group, by name, in order."""
        return sorted(name for name, one in processes.items() if name in elastic and one not in self.able)

    def begin_group(self) -> None:
        """Give up the old group."""
        self.group = {}

    def joined(self, processes: Processes) -> None:
        """Note that `processes` form a working group."""
        self.group = dict(processes)
        self.able = set(processes.values())

    def begin_push(self) -> None:
        """Note that a push begins: until `pushed`, no engine is known to hold the weights of one version."""
        assert self.group, "a push needs a group"
        self.current = {}

    def pushed(self) -> None:
        """Note that the whole group holds the current weights."""
        self.current = dict(self.group)

    def failed(self) -> None:
        """Note that a push or a join failed: engines may hold parts of the weights, and the group is unusable."""
        self.group = {}
        self.current = {}
