"""What the edge counts and times, for Prometheus. docs/metrics.md lists it.

Dict operations and counters alone, so that a pass costs the same with and without them.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Hashable
from importlib.metadata import version
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, Info, PlatformCollector, ProcessCollector

from grpo_operator.names import Reason
from grpo_operator.watched import WatchedJobs

Result = Literal["success", "requeue_after", "conflict", "error"]

_OF_LAUNCHERS = {"RankFailed", "PeerLost", "PeersMissing", "EngineDied", "ConfigError", "ContractRefused", "LauncherDied", "StoppedEarly"}
_OF_KUBELETS = {"OOMKilled", "Error", "ContainerCannotRun", "StartError", "OutcomeMissing", "PodFailed", "UnexpectedAdmissionError"}
REASONS = frozenset({str(reason) for reason in Reason} | _OF_LAUNCHERS | _OF_KUBELETS)
"""Reasons that are labels as they are; a pod may say anything, and every other word becomes Other."""

_FAST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SLOW = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class Instruments:
    """All metrics of one operator. Keys are the work queue's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds; only their differences matter."""
        self._clock = clock
        self.registry = registry = CollectorRegistry()
        self.jobs: WatchedJobs[Any] = WatchedJobs()
        registry.register(self.jobs)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("grpo_operator_build", "What runs.", registry=registry)
        build.info({"version": version("grpo-operator"), "kopf": version("kopf"), "python": platform.python_version()})
        self._passes = Histogram(
            "grpo_operator_reconcile_duration_seconds",
            "Seconds of a pass over a job, by how it ended.",
            ["result"],
            buckets=_FAST,
            registry=registry,
        )
        self._last_pass = Gauge(
            "grpo_operator_last_reconcile_timestamp_seconds", "When a pass last ended without an error, in Unix time.", registry=registry
        )
        self._depth = Gauge("grpo_operator_workqueue_depth", "Jobs that wait for a pass that is due.", registry=registry)
        self._active = Gauge("grpo_operator_workqueue_active", "Passes under way.", registry=registry)
        self._retries = Counter("grpo_operator_workqueue_retries", "Passes that failed and are tried again.", registry=registry)
        self._backing_off = Gauge("grpo_operator_workqueue_backing_off", "Jobs whose last pass failed.", registry=registry)
        self._backing_off.set_function(lambda: float(len(self._failing)))
        self._requests = Counter(
            "grpo_operator_api_requests", "Requests to the API server, without watches.", ["verb", "kind", "code"], registry=registry
        )
        self._answers = Counter(
            "grpo_operator_progress_requests", "Launchers asked for their progress, by whether they told it.", ["result"], registry=registry
        )
        self._restarts = Counter(
            "grpo_operator_restarts",
            "Restarts of jobs and of engines, by the failure's reason.",
            ["namespace", "reason"],
            registry=registry,
        )
        self._applied = Histogram(
            "grpo_operator_children_applied_seconds",
            "Seconds from a job's creation (attempt: first) or an attempt's begin (later) to all its children applied.",
            ["attempt"],
            buckets=_SLOW,
            registry=registry,
        )
        self._lag = Histogram(
            "grpo_operator_status_lag_seconds",
            "Seconds from a change that was watched to the status that follows from it, written.",
            buckets=_SLOW,
            registry=registry,
        )
        for result in get_args(Result):  # all that can be told is told from the start, as 0: rates see the first one too
            self._passes.labels(result)
        for result in ("answered", "silent"):
            self._answers.labels(result)
        for attempt in ("first", "later"):
            self._applied.labels(attempt)
        self._noticed: dict[Hashable, float] = {}
        self._in_pass: dict[Hashable, float] = {}
        self._failing: set[Hashable] = set()
        self._begun: dict[Hashable, tuple[str, float]] = {}

    def noticed(self, key: Hashable) -> None:
        """Something about a job has changed; what the next pass does about it counts from here."""
        self._noticed.setdefault(key, self._clock())

    def waiting(self) -> None:
        """A pass is due, and waits for its turn until `begin_pass`."""
        self._depth.inc()

    def turn_given_up(self) -> None:
        """A pass was cancelled while it waited for its turn."""
        self._depth.dec()

    def begin_pass(self, key: Hashable) -> float:
        """A pass begins: when, by the instruments' clock."""
        self._depth.dec()
        self._active.inc()
        if (since := self._noticed.pop(key, None)) is not None:
            self._in_pass.setdefault(key, since)  # a pass before that failed noticed something earlier
        return self._clock()

    def end_pass(self, key: Hashable, began: float, result: Result) -> None:
        """A pass that began at `began` has ended."""
        self._active.dec()
        self._passes.labels(result).observe(self._clock() - began)
        if result == "error":
            self._retries.inc()
            self._failing.add(key)
            return
        self._failing.discard(key)
        self._last_pass.set_to_current_time()
        if result != "conflict":
            self._in_pass.pop(key, None)

    def status_written(self, key: Hashable) -> None:
        """The status says what the pass has seen."""
        if (since := self._in_pass.pop(key, None)) is not None:
            self._lag.observe(self._clock() - since)

    def attempt_begun(self, key: Hashable, *, waited: float | None) -> None:
        """The status tells of a new attempt; `waited` is the seconds since the job's creation where that is what it waited for."""
        self._begun[key] = ("later" if waited is None else "first", self._clock() - (waited or 0.0))

    def children_applied(self, key: Hashable) -> None:
        """All children of the job's attempt are as they should be."""
        if (begun := self._begun.pop(key, None)) is not None:
            attempt, since = begun
            self._applied.labels(attempt).observe(self._clock() - since)

    def restarted(self, namespace: str, reason: str) -> None:
        """A job, or an engine of one, is made anew for `reason`."""
        self._restarts.labels(namespace, reason if reason in REASONS else "Other").inc()

    def requested(self, verb: str, kind: str, code: int | None) -> None:
        """The API server has answered with `code`; None where it has not."""
        self._requests.labels(verb, kind, "none" if code is None else str(code)).inc()

    def asked(self, *, answered: bool) -> None:
        """A launcher was asked for its progress."""
        self._answers.labels("answered" if answered else "silent").inc()

    def gone(self, key: Hashable) -> None:
        """A job is no longer there: nothing is kept of it."""
        self.jobs.gone(key)
        self._failing.discard(key)
        for kept in (self._noticed, self._in_pass):
            kept.pop(key, None)
        self._begun.pop(key, None)
