"""Choice of the environment pod for a session, by what the rank knows of each; without the requests. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from grpo_spec.contract import EnvironmentGroup
from grpo_spec.words import counted

LONGEST_AVOIDED = 15.0
"""Seconds that a pod which has failed again and again is left alone, at most; one that has failed once, one second."""
FULL_SECONDS = 0.5
"""Seconds until a pod that was full is asked again. Another rank may have ended a session."""


@dataclass(slots=True, eq=False, kw_only=True)
class Pod:
    """An environment pod, as one rank knows it. Times are of the monotonic clock, in seconds."""

    address: str
    group: str
    sessions: int  # at a time
    environments: Collection[str]
    place: int  # breaks ties; each rank begins with another pod
    num_open: int = 0  # sessions of this rank, also those that are being opened
    is_full: bool = False
    trouble: str = ""  # why it opened no session the last time
    _failures: int = 0  # outages since a session went well
    _failed_at: float = field(default=float("-inf"))
    _free_at: float = field(default=float("-inf"))  # until then it is not asked

    def serves(self, environment: str | None) -> bool:
        """Whether it has this environment; all have tools."""
        return environment is None or environment in self.environments

    def has_room(self, now: float) -> bool:
        """Whether to ask it for a session."""
        return now >= self._free_at and self.num_open < self.sessions

    def wait(self, now: float) -> float:
        """Return for how many seconds it is not asked."""
        return max(0.0, self._free_at - now)

    def opened(self) -> None:
        """Note that it has opened a session."""
        self.is_full, self.trouble = False, ""

    def full(self, now: float) -> None:
        """Note that it has no room."""
        self.is_full, self._free_at = True, now + FULL_SECONDS

    def failed(self, why: str, since: float, now: float) -> None:
        """Note that it, or the way to it, has failed, and leave it alone for longer each time.

        Sessions that an outage ends all say so: `since` is when this one was opened, and one that was open when the
        outage was noted does not count again.
        """
        self.is_full, self.trouble = False, why
        if since <= self._failed_at:
            return
        self._free_at = now + min(2.0**self._failures, LONGEST_AVOIDED)
        self._failures += 1
        self._failed_at = now

    def closed(self, since: float | None) -> None:
        """Note the end of a session of this rank: `since` is when it was opened, if it went well."""
        self.num_open -= 1
        if self.is_full:
            self.is_full, self._free_at = False, float("-inf")
        if since is not None and since > self._failed_at:
            self._failures = 0


def pods_of(groups: Iterable[EnvironmentGroup], rank: int) -> list[Pod]:
    """Return the pods of all groups; `rank` begins with another one than others do."""
    found = [(group, address) for group in groups for address in group.addresses]
    return [
        Pod(
            address=address,
            group=group.name,
            sessions=group.sessions,
            environments=group.environments,
            place=(number - rank) % len(found),
        )
        for number, (group, address) in enumerate(found)
    ]


def choose(pods: Iterable[Pod], tried: Collection[Pod], now: float) -> Pod | None:
    """Return the pod with room of whose sessions this rank has the smallest share; None if none is left to try."""
    left = [pod for pod in pods if pod not in tried and pod.has_room(now)]
    return min(left, key=lambda pod: (pod.num_open / pod.sessions, pod.place), default=None)


def are_full(pods: Iterable[Pod]) -> bool:
    """Whether there is a pod that can be used, and has all its sessions."""
    return any(pod.is_full or pod.num_open >= pod.sessions for pod in pods)


def complaint(pods: Sequence[Pod], seconds: float) -> str:
    """Say that no session could be opened for so long, and what to do."""
    names = ", ".join(f"environmentPods.groups[{name}]" for name in dict.fromkeys(pod.group for pod in pods))
    if are_full(pods):
        total = sum(pod.sessions for pod in pods)
        return (
            f"{names}: no session became free for {seconds:g} s; "
            f"{counted(len(pods), 'pod has', 'pods have')} {total}. Raise `replicas`, or "
            "`sessions` where pods have memory for more"
        )
    why = "; ".join(f"{pod.address}: {pod.trouble or 'not asked'}" for pod in pods[:3])
    return f"{names}: 0 of {counted(len(pods), 'pod')} could be used for {seconds:g} s ({why})"
