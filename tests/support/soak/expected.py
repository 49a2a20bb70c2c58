"""Acts on a job of the soak, and the state that the operator must have made of them. Pure.

What is done to a job at rest has one result. What is done to a job in between may hide, or be hidden by, what was done
before: then a range of results is right, until the job is at rest again and shows which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Spec = Mapping[str, Any]
ENDED = frozenset({"Succeeded", "Failed"})


class Count(NamedTuple):
    """A count of the status when the job was last at rest, and the least and the most that it may be by now."""

    known: int = 0
    least: int = 0
    most: int = 0

    def plus(self, least: int, most: int, *, at_rest: bool) -> Count:
        """Add what was done; to a job that is not at rest it may add nothing, and hide what was done before."""
        return Count(self.known, self.least + least if at_rest else self.known, self.most + most)


NONE, ONE = Count(), Count(0, 1, 1)


@dataclass(frozen=True)
class Blow:
    """A fault of a pod: whether a restart follows, whether it counts, whether it is one of an engine alone.

    None: that depends on who is faster.
    """

    restarts: bool | None = True
    counts: bool | None = True
    engine: bool = False


FAILURE = Blow()
EVICTION = Blow(counts=None)  # counted as PodReplaced if nobody was there to see why the pod went away
REPEATED = Blow(None, None)  # one restart answers the failures of all pods, but each engine is replaced by itself


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One job. `phases`: those that it may have at rest. `attempts`: how many have begun."""

    name: str
    uid: str
    spec: Spec
    phases: frozenset[str] = frozenset({"Running"})
    restarts: Count = NONE
    counted: Count = NONE
    attempts: Count = NONE
    closing: bool = False  # its pods have finished: nothing else may happen to them

    @property
    def suspended(self) -> bool:
        return bool(self.spec.get("suspend"))

    @property
    def max_restarts(self) -> int:
        return int(self.spec["failurePolicy"]["maxRestarts"])

    @property
    def replaces_engines(self) -> bool:
        return self.spec["failurePolicy"].get("onGenerationFailure") == "RestartGeneration"

    @property
    def has_engines(self) -> bool:
        return "server" in self.spec.get("generation", {})

    @property
    def groups(self) -> dict[str, int]:
        """Number of pods of each group."""
        engines = self.spec.get("generation", {}).get("server", {}).get("groups", ())
        return {group["name"]: group.get("replicas", 1) for group in [*self.spec["trainer"]["groups"], *engines]}

    @property
    def pods(self) -> set[str]:
        """Names of all pods."""
        return {f"{self.name}-{group}-{i}" for group, count in self.groups.items() for i in range(count)}

    @property
    def trainers(self) -> set[str]:
        """Names of the pods that train."""
        groups = tuple(f"{self.name}-{group['name']}-" for group in self.spec["trainer"]["groups"])
        return {pod for pod in self.pods if pod.startswith(groups)}

    def hit(self, blow: Blow, *, at_rest: bool) -> Expected:
        """Return what is expected once a pod of the job has suffered this."""
        surely = at_rest and blow.restarts is True
        after = replace(
            self,
            restarts=self.restarts.plus(surely, 1, at_rest=at_rest),
            counted=self.counted.plus(surely and blow.counts is True, 1, at_rest=at_rest),
            attempts=self.attempts.plus(surely and not blow.engine, not blow.engine, at_rest=at_rest),
            phases=self.phases if at_rest else self.phases | {"Suspended" if self.suspended else "Running"},
        )
        if after.counted.most <= self.max_restarts:
            return after
        # The failure that is one too many ends the job, and is no restart.
        return replace(
            after,
            phases=frozenset({"Failed"}) if after.counted.least > self.max_restarts else after.phases | {"Failed"},
            restarts=after.restarts._replace(least=self.restarts.least),
            attempts=after.attempts._replace(least=self.attempts.least),
            counted=Count(self.counted.known, min(after.counted.least, self.max_restarts), self.max_restarts),
        )

    def finished(self) -> Expected:
        """Return what is expected once all pods that train have finished."""
        return replace(self, phases=frozenset({"Succeeded"}), closing=True)

    def edited(self, *, at_rest: bool, **spec: Any) -> Expected:
        """Return what is expected once fields of the spec were changed, `suspend` too."""
        after = replace(self, spec={**self.spec, **spec})
        if after.suspended == self.suspended or self.closing or (self.phases <= ENDED and at_rest):
            return after
        # A suspension hides a failure that no pass has seen yet, even if it was one too many.
        return replace(
            after,
            phases=self.phases - {"Running", "Suspended"} | {"Suspended" if after.suspended else "Running"},
            restarts=self.restarts.plus(0, 0, at_rest=at_rest),
            counted=self.counted.plus(0, 0, at_rest=at_rest),
            attempts=self.attempts.plus(not after.suspended, not after.suspended, at_rest=at_rest),
        )

    def seen(self, status: Mapping[str, Any]) -> Expected:
        """Return what is expected from now on, as the job is at rest with this status."""
        restarts = status["restarts"]
        return replace(
            self,
            phases=frozenset({status["phase"]}),
            restarts=Count(*[restarts["total"]] * 3),
            counted=Count(*[restarts["counted"]] * 3),
            attempts=Count(*[status.get("attempt", -1) + 1] * 3),
        )
