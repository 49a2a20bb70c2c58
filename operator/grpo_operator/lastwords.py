"""What pods last said before they were gone, as the watch tells it; a list of pods comes too late for some.

The StatefulSet controller deletes a pod in phase Failed as soon as it sees it, and the API server then removes it at once: evicted by a
kubelet, it is there for milliseconds. Nothing depends on this memory but the name of a cause: without it, such a pod counts as PodReplaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
Object = Mapping[str, Any]

PATIENCE_SECONDS = 2.0
"""How long the watch may lag behind a list that no longer has a pod."""


class LastWords(Generic[K]):
    """By job: pods that were deleted since the last pass that has taken them down."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds; only their differences matter."""
        self._clock = clock
        self._heard: dict[K, dict[str, Object]] = {}
        self._missed: dict[K, float] = {}

    def heard(self, key: K, pod: Object) -> None:
        """A pod was deleted; `pod` is how it was at last. The job's next pass has to come after this."""
        self._heard.setdefault(key, {})[pod["metadata"]["uid"]] = pod

    def of(self, key: K) -> list[Object]:
        """The pods of a job that were heard of."""
        return list(self._heard.get(key, {}).values())

    def may_come(self, key: K) -> bool:
        """Whether it is too early to give up on hearing of pods that a list lacks: for a while from the first time this is asked."""
        return self._clock() - self._missed.setdefault(key, self._clock()) < PATIENCE_SECONDS

    def taken_down(self, key: K, uids: Iterable[str]) -> None:
        """A pass has made of these pods what it could."""
        self._missed.pop(key, None)
        heard = self._heard.get(key, {})
        for uid in uids:
            heard.pop(uid, None)
        if not heard:
            self._heard.pop(key, None)

    def forget(self, key: K) -> None:
        """The job is gone."""
        self._missed.pop(key, None)
        self._heard.pop(key, None)
