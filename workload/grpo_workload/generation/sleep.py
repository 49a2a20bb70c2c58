"""What an engine that sleeps may do next: pure rules over vLLM's sleep levels, for all devices.

Level 1 keeps the weights in host memory; level 2 drops them, and waking then maps memory that holds no weights. An engine that generates
from it answers with noise and no error, so from level 2 only a full push of weights leads back.
"""

from __future__ import annotations


class SleepCycle:
    """State of one engine. Methods that lead out of sleep return the tags to pass to vLLM's `wake_up`, none when it is awake."""

    def __init__(self, level: int) -> None:
        """An awake engine with weights, which goes to sleep at `level` 1 or 2; 0 keeps it awake."""
        self._level = level
        self._asleep: set[str] = set()
        self._has_weights = True

    def check_generate(self) -> None:
        """RuntimeError unless the engine is awake and holds weights."""
        if not self._has_weights:
            raise RuntimeError("the engine holds no weights: sleep level 2, or a push of weights that did not finish, needs a full push")
        if self._asleep:
            raise RuntimeError("the engine is asleep; push weights to wake it")

    def sleep(self) -> int:
        """Level to sleep at, 0 for not at all."""
        if self._asleep:
            return 0
        if self._level > 0:
            self._asleep = {"weights", "kv_cache"}
        self._has_weights = self._has_weights and self._level < 2
        return self._level

    def begin_push(self) -> list[str]:
        """Before the first weight: room for weights is needed, the cache's not yet. Until `end_push` the weights are of two versions."""
        self._has_weights = False
        return self._wake("weights")

    def end_push(self) -> list[str]:
        """After the last weight."""
        self._has_weights = True
        return self._wake("kv_cache")

    def _wake(self, tag: str) -> list[str]:
        if tag not in self._asleep:
            return []
        self._asleep.discard(tag)
        return [tag]
