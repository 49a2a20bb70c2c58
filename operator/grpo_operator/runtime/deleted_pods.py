"""The final state of pods just deleted, from the watch: some pods are gone before a list can show why.

The StatefulSet controller deletes a pod in phase Failed as soon as it sees it, and the API server removes it at once: a
pod that its kubelet evicted exists for milliseconds. Only the name of the cause depends on this memory: without it,
such a pod counts as PodReplaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from grpo_operator.decide.observed_pod import ObservedPod

K = TypeVar("K", bound=Hashable)

PATIENCE_SECONDS = 2.0
"""Seconds that the watch may lag behind a list that no longer has a pod."""

KEPT_SECONDS = 600.0
"""Seconds for which the state of a pod is kept at least. Nothing records it in an operator that does not lead."""


class DeletedPods(Generic[K]):
    """Pods that were deleted and not recorded by a pass yet, for each job."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds; only their differences matter."""
        self._clock = clock
        self._pods: dict[K, dict[str, tuple[float, ObservedPod]]] = {}
        self._waiting_since: dict[K, float] = {}

    def remember(self, key: K, pod: ObservedPod) -> None:
        """Keep the final state of a deleted pod. Wake the job's next pass only after this."""
        now, pods = self._clock(), self._pods.get(key, {})
        recent = {uid: kept for uid, kept in pods.items() if now - kept[0] < KEPT_SECONDS}
        self._pods[key] = recent | {pod.uid: (now, pod)}

    def of(self, key: K) -> list[ObservedPod]:
        """Return the final states of a job's deleted pods."""
        return [pod for _, pod in self._pods.get(key, {}).values()]

    def may_still_arrive(self, key: K) -> bool:
        """Whether the watch may still deliver a pod that a list lacks: until PATIENCE_SECONDS after the first call."""
        return self._clock() - self._waiting_since.setdefault(key, self._clock()) < PATIENCE_SECONDS

    def recorded(self, key: K, uids: Iterable[str]) -> None:
        """Drop the pods that a pass has recorded."""
        self._waiting_since.pop(key, None)
        pods = self._pods.get(key, {})
        for uid in uids:
            pods.pop(uid, None)
        if not pods:
            self._pods.pop(key, None)

    def forget(self, key: K) -> None:
        """Drop everything about a job that no longer exists."""
        self._waiting_since.pop(key, None)
        self._pods.pop(key, None)
