"""The final state of pods just deleted, from the watch: some pods are gone before a list can show why.

The StatefulSet controller deletes a pod in phase Failed as soon as it sees it, and the API server removes it at once: a
pod that its kubelet evicted exists for milliseconds. Only the name of the cause depends on this memory: without it,
such a pod counts as PodReplaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from grpo_operator.api.times import after
from grpo_operator.decide.observed_pod import ObservedPod

PATIENCE_SECONDS = 2.0
"""Seconds that the watch may lag behind a list that no longer has a pod."""

KEPT_SECONDS = 600.0
"""Seconds for which the state of a pod is kept at least. Nothing records it in an operator that does not lead."""


class DeletedPods:
    """Pods of one job that were deleted and not recorded by a pass yet."""

    __slots__ = ("_clock", "_pods", "_waiting_since")

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds; only their differences matter."""
        self._clock = clock
        self._pods: dict[str, tuple[float, ObservedPod]] = {}
        self._waiting_since: float | None = None

    def remember(self, pod: ObservedPod) -> None:
        """Keep the final state of a deleted pod. Wake the job's next pass only after this."""
        now = self._clock()
        recent = {uid: kept for uid, kept in self._pods.items() if now - kept[0] < KEPT_SECONDS}
        self._pods = recent | {pod.uid: (now, pod)}

    def __iter__(self) -> Iterator[ObservedPod]:
        """Yield the final states."""
        return iter([pod for _, pod in self._pods.values()])

    def seen(self, now: datetime) -> list[ObservedPod]:
        """Return the final states with the times when the pods were gone, by the clock that shows `now`."""
        elapsed = self._clock()
        return [replace(pod, gone_at=after(now, at - elapsed)) for at, pod in self._pods.values()]

    def may_still_arrive(self) -> bool:
        """Whether the watch may still deliver a pod that a list lacks: until PATIENCE_SECONDS after the first call."""
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < PATIENCE_SECONDS

    def recorded(self, uids: Iterable[str]) -> None:
        """Drop the pods that a pass has recorded."""
        self._waiting_since = None
        for uid in uids:
            self._pods.pop(uid, None)
