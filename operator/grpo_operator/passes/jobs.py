"""All that is kept between passes about a job, and one place that forgets it.

An operator that has just started has none of it, and decides the same: it reads specs, compares children and asks
launchers once more, may write a status or look a little earlier, and calls a pod that disappeared meanwhile
PodReplaced, whatever took it away.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.stored_spec import StoredSpec
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.deleted_pods import DeletedPods
from grpo_operator.runtime.kept import Key, Versions
from grpo_operator.runtime.rate_limits import PassIntervals, WriteRates, Writes
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress

REMEMBERED = 1024
"""Number of jobs whose spec is not read again while it is the same, at some 30 KiB each: to read one takes a
millisecond, as long as the rest of a pass that finds nothing to do."""


@dataclass(frozen=True, slots=True)
class Round:
    """Whom to ask: the port, rank 0's pod first, and whether its answer calls for those of all others."""

    port: int
    pods: Sequence[ObservedPod]
    asks_all: Callable[[Progress], bool]


@dataclass(frozen=True, slots=True)
class Understood:
    """A spec as read, the job that has it, and where its ranks and engines run.

    `basis`: the stored spec, the defaults that the status keeps, what the site sets, and the queue that the job names.
    """

    basis: tuple[Any, ...]
    stored: StoredSpec
    job: Job
    topology: Topology


@dataclass(slots=True)
class Answers:
    """Newest progress of a job's launchers by the UID of their pods, and the round of questions to come."""

    progress: dict[str, Progress] = field(default_factory=dict)
    asked: str = ""
    """UID of the pod of rank 0 that was asked last."""
    is_asking: bool = False
    due: float = math.inf
    round: asyncio.Task[None] | None = None

    def stop(self) -> float:
        """Cancel the round to come; return when it was due."""
        due, old = self.due, self.round
        self.due, self.round = math.inf, None
        if old is not None:
            old.cancel()
        return due

    def clear(self) -> None:
        """Cancel the round to come, and drop all answers."""
        self.stop()
        self.progress, self.asked = {}, ""


@dataclass(frozen=True, slots=True)
class Quiet:
    """A pass that found nothing to do, and what it saw. Times are those of the loop's clock: unless something changes,
    another pass finds the same before `deadline`; from `until` on, one is due nevertheless.
    """

    versions: Versions
    since: float
    until: float
    deadline: float
    delay: float
    round: Round | None


@dataclass(slots=True)
class Question:
    """About a pod that is missing, or not prepared: its name and the UID of what creates it, or its own, the seconds
    until the API server is asked again, when that is due, and the last answer (reason, message).
    """

    about: tuple[str, str]
    wait: float
    due: float
    answer: tuple[Reason, str] | None = None


@dataclass(slots=True)
class JobState:
    """All that is kept between passes about one job."""

    deleted_pods: DeletedPods
    understood: Understood | None = None
    in_force: tuple[object, ...] | None = None
    """Basis of the last comparison of the children with a plan, if nothing was to change; `ChildDiff`."""
    answers: Answers = field(default_factory=Answers)
    quiet: Quiet | None = None
    writes: Writes = field(default_factory=Writes)
    gone_sets: set[str] = field(default_factory=set)
    """UIDs of StatefulSets and Jobs that pods name as their controller and that no longer exist."""
    question: Question | None = None
    """The question why a pod does not exist that should, or what it waits for."""
    runs: bool | None = None
    """Whether the job runs, if it will be looked at again by time alone; else None."""


class Jobs:
    """The state of each job. `rates` and `intervals` hold sums over them.

    `monotonic` gives seconds; only their differences matter.
    """

    def __init__(self, monotonic: Callable[[], float], instruments: Instruments) -> None:
        self._monotonic, self._instruments = monotonic, instruments
        self._states: dict[Key, JobState] = {}
        self._understood: dict[Key, None] = {}  # used least recently first
        self.rates, self.intervals = WriteRates(), PassIntervals()

    def __iter__(self) -> Iterator[JobState]:
        return iter(self._states.values())

    def of(self, key: Key) -> JobState:
        """Return the state of a job. Ask again after every await: it may have been forgotten meanwhile."""
        if (state := self._states.get(key)) is None:
            state = self._states[key] = JobState(DeletedPods(self._monotonic))
        return state

    def understand(self, key: Key, understood: Understood) -> None:
        """Keep what a spec means, for the last REMEMBERED jobs."""
        self.of(key).understood = understood
        self._understood.pop(key, None)
        self._understood[key] = None
        if len(self._understood) > REMEMBERED:
            oldest = next(iter(self._understood))
            del self._understood[oldest]
            self.of(oldest).understood = None

    def expect(self, key: Key, *, runs: bool | None) -> None:
        """Note that a job, which runs or waits, will be looked at again by time alone; None: only a change calls."""
        state = self.of(key)
        self.intervals.move(state.runs, runs)
        state.runs = runs

    def forget(self, key: Key) -> None:
        """Drop everything about a job that no longer exists."""
        self._instruments.gone(key)
        self._understood.pop(key, None)
        if (state := self._states.pop(key, None)) is not None:
            state.answers.stop()
            self.rates.settled(state.writes)
            self.intervals.move(state.runs, None)
