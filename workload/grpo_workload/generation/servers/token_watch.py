"""Judges by vLLM's metrics whether an engine makes progress with its requests, however long these take. Pure.

A server whose workers hang still answers GET /health. But each step of an engine changes its metrics: tokens that were
sampled, blocks of the cache that a long prompt fills. So an engine hangs if it has requests and its metrics stay the
same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SAMPLE = re.compile(r'^vllm:[^{\n]*\{(?:[^}\n]*,)?engine="(\d+)"[^\n]*$', re.MULTILINE)
_RUNNING = re.compile(r"^vllm:num_requests_running\{[^}\n]*\} (?!0(?:\.0)?$)", re.MULTILINE)


def replicas(metrics: str) -> dict[str, str]:
    """Return vLLM's samples in the text of GET /metrics, by data-parallel copy of the engine."""
    found: dict[str, list[str]] = {}
    for sample in _SAMPLE.finditer(metrics):
        found.setdefault(sample[1], []).append(sample[0])
    return {replica: "\n".join(lines) for replica, lines in found.items()}


@dataclass(slots=True, kw_only=True)
class TokenWatch:
    """One engine's progress, as one rank knows it. Times are in seconds, of any clock."""

    limit: float  # seconds without progress after which a process that has answered before hangs
    first_limit: float  # the same before its first answer: kernels are compiled during the first steps
    quiet: float  # seconds without an answer after which to look at the metrics: a lively engine need not be asked
    copies: int  # data-parallel copies of the engine
    in_flight: int = 0  # this rank's requests
    is_stuck: bool = False  # from the moment at which it hangs until it makes progress
    _process: str = ""  # name of the process that has these requests
    _has_answered: bool = False
    _moved: float = 0.0  # when a first request was sent, or one was answered, or a replica made progress
    _samples: dict[str, str] = field(default_factory=dict)  # by replica
    _changed: dict[str, float] = field(default_factory=dict)  # by replica: when its samples changed

    @property
    def allowed(self) -> float:
        """Seconds without progress after which the process hangs."""
        return self.limit if self._has_answered else self.first_limit

    def sent(self, process: str, now: float) -> None:
        """Note a request to this process of the engine."""
        if process != self._process:
            self._process, self._has_answered = process, False
        if self.in_flight == 0:
            self._moved = now
            self._samples.clear()
        self.in_flight += 1

    def ended(self, *, answered: bool, now: float) -> None:
        """Note the end of a request."""
        self.in_flight -= 1
        if answered:
            self._has_answered, self._moved = True, now

    def needs_look(self, now: float) -> bool:
        """Return whether to ask for metrics: answers show progress of the engine, but not of each copy."""
        return self.is_stuck or (self.in_flight > 0 and (self.copies > 1 or now - self._moved > self.quiet))

    def see(self, metrics: str, now: float) -> bool:
        """Take in the engine's metrics; return whether it has made progress since they were seen last."""
        moved = False
        for replica, samples in replicas(metrics).items():
            if self._samples.get(replica) != samples:
                moved = moved or replica in self._samples
                self._samples[replica], self._changed[replica] = samples, now
        if moved:
            self._moved = now
        # An engine that hung when its requests were given up still hangs.
        self.is_stuck = self._silence(now) > self.allowed if self.in_flight else self.is_stuck and not moved
        return moved

    def rested(self, now: float) -> None:
        """Note that the engine goes on after a pause that was asked for."""
        self._moved = now
        self._changed = dict.fromkeys(self._changed, now)

    def _silence(self, now: float) -> float:
        """Return for how long the engine, or a copy of it that has requests, has got no further."""
        running = [replica for replica, samples in self._samples.items() if _RUNNING.search(samples)]
        return max([now - self._moved, *(now - self._changed[replica] for replica in running)])
