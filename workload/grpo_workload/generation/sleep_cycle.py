"""Rules for vLLM's sleep levels: what a colocated engine may do next. Pure, and the same for all devices.

Level 1 keeps the weights in host memory. Level 2 drops them, and waking then maps memory that holds no weights: an
engine that generated from it would answer with noise and raise no error. So after level 2 only a full push of weights
allows generation again.
"""

from __future__ import annotations


class SleepCycle:
    """State of one engine. Methods that wake it return the tags for vLLM's `wake_up`; none when it is awake already."""

    def __init__(self, level: int) -> None:
        """Start with an awake engine that holds weights; `level` 1 or 2 is how it sleeps, 0 keeps it awake."""
        self._level = level
        self._asleep: set[str] = set()
        self._has_weights = True

    @property
    def has_weights(self) -> bool:
        """Whether the engine holds weights, awake or in host memory."""
        return self._has_weights

    def check_generate(self) -> None:
        """Raise RuntimeError unless the engine is awake and holds weights."""
        if not self._has_weights:
            raise RuntimeError(
                "the engine holds no weights: after sleep level 2 or an unfinished push it needs a full push"
            )
        if self._asleep:
            raise RuntimeError("the engine is asleep; push weights to wake it")

    def sleep(self) -> int:
        """Return the level to sleep at; 0 means not to sleep."""
        if self._asleep:
            return 0
        if self._level > 0:
            self._asleep = {"weights", "kv_cache"}
        self._has_weights = self._has_weights and self._level < 2
        return self._level

    def begin_push(self) -> list[str]:
        """Note that a push begins: wake only the weights' memory. Until `end_push` two versions are mixed."""
        self._has_weights = False
        return self._wake("weights")

    def end_push(self) -> list[str]:
        """Note that the last weight has been loaded: wake the cache's memory."""
        self._has_weights = True
        return self._wake("kv_cache")

    def _wake(self, tag: str) -> list[str]:
        if tag not in self._asleep:
            return []
        self._asleep.discard(tag)
        return [tag]
