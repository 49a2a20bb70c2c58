"""The operator's own metrics for Prometheus; docs/metrics.md lists them.

They cost a few dict operations and counters, so that they do not slow a pass.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Hashable
from importlib.metadata import version
from typing import Any, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)

from grpo_operator.metrics.jobs import WatchedJobs, label_of
from grpo_operator.metrics.mirror import MirrorCollector

Result = Literal["success", "requeue_after", "conflict", "error"]

_FAST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SLOW = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class Instruments:
    """All metrics of one operator. Its keys are those of the work queue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds; only their differences matter."""
        self._clock = clock
        self.registry = registry = CollectorRegistry()
        self.jobs: WatchedJobs[Any] = WatchedJobs()
        registry.register(self.jobs)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("grpo_operator_build", "Versions of the operator, of kopf and of Python.", registry=registry)
        build.info({"version": version("grpo-operator"), "kopf": version("kopf"), "python": platform.python_version()})
        self._leader = Gauge(
            "grpo_operator_leader", "1 if this operator acts on jobs; 0 while it stands by.", registry=registry
        )
        self.crd_missing_fields = Gauge(
            "grpo_operator_crd_missing_fields",
            "Number of fields of this release that the CRD of the cluster lacks: the API server drops them.",
            registry=registry,
        )
        self._passes = Histogram(
            "grpo_operator_reconcile_duration_seconds",
            "Duration of a pass over a job in seconds, by result.",
            ["result"],
            buckets=_FAST,
            registry=registry,
        )
        self._last_pass = Gauge(
            "grpo_operator_last_reconcile_timestamp_seconds",
            "Unix time when a pass last ended without an error.",
            registry=registry,
        )
        self._depth = Gauge(
            "grpo_operator_workqueue_depth",
            "Number of jobs whose pass is due and waits for a free slot.",
            registry=registry,
        )
        self._active = Gauge("grpo_operator_workqueue_active", "Number of passes that run now.", registry=registry)
        self._retries = Counter(
            "grpo_operator_workqueue_retries", "Number of passes that failed and were retried.", registry=registry
        )
        self._backing_off = Gauge(
            "grpo_operator_workqueue_backing_off", "Number of jobs whose last pass failed.", registry=registry
        )
        self._backing_off.set_function(lambda: float(len(self._failing)))
        self._requests = Counter(
            "grpo_operator_api_requests",
            "Number of requests to the API server, without watches.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self._answers = Counter(
            "grpo_operator_progress_requests",
            "Number of requests for progress to launchers, by whether they answered.",
            ["result"],
            registry=registry,
        )
        self._restarts = Counter(
            "grpo_operator_restarts",
            "Number of restarts of jobs and of engines, by reason of the failure.",
            ["namespace", "reason"],
            registry=registry,
        )
        self._applied = Histogram(
            "grpo_operator_children_applied_seconds",
            "Seconds until all children of an attempt are applied, from the creation of the job (attempt=first) or "
            "from the beginning of the attempt (attempt=later).",
            ["attempt"],
            buckets=_SLOW,
            registry=registry,
        )
        self._lag = Histogram(
            "grpo_operator_status_lag_seconds",
            "Seconds from a watched change until the status that follows from it is written.",
            buckets=_SLOW,
            registry=registry,
        )
        self.mirror = MirrorCollector(clock)
        registry.register(self.mirror)
        self._lists = Counter(
            "grpo_operator_mirror_lists",
            "Number of full lists of a kind, by why: start, expired (version no longer served), disorder, hourly.",
            ["kind", "reason"],
            registry=registry,
        )
        self._second_looks = Counter(
            "grpo_operator_second_looks",
            "Number of plans that were made again from a live read, by whether it confirmed them.",
            ["result"],
            registry=registry,
        )
        # Every series starts at 0: rates include the first event.
        for result in get_args(Result):
            self._passes.labels(result)
        for result in ("answered", "silent"):
            self._answers.labels(result)
        for attempt in ("first", "later"):
            self._applied.labels(attempt)
        for result in ("confirmed", "outdated"):
            self._second_looks.labels(result)
        self._noticed: dict[Hashable, float] = {}
        self._in_pass: dict[Hashable, float] = {}
        self._failing: set[Hashable] = set()
        self._begun: dict[Hashable, tuple[str, float]] = {}

    def leads(self) -> None:
        """Record that this operator acts from now on; another, which may have acted before, shows no jobs any more."""
        self._leader.set(1)
        self.jobs.shown = True

    def noticed(self, key: Hashable) -> None:
        """Record that something about a job changed. The status lag counts from here."""
        self._noticed.setdefault(key, self._clock())

    def waiting(self) -> None:
        """Record that a pass is due; it waits for a free slot until `begin_pass`."""
        self._depth.inc()

    def turn_given_up(self) -> None:
        """Record that a pass was cancelled while it waited for a slot."""
        self._depth.dec()

    def begin_pass(self, key: Hashable) -> float:
        """Record that a pass begins. Return the time for `end_pass`."""
        self._depth.dec()
        self._active.inc()
        if (since := self._noticed.pop(key, None)) is not None:
            self._in_pass.setdefault(key, since)  # an earlier pass that failed keeps its earlier time
        return self._clock()

    def end_pass(self, key: Hashable, began: float, result: Result) -> None:
        """Record that the pass that began at `began` has ended."""
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
        """Record that the pass wrote a new status."""
        if (since := self._in_pass.pop(key, None)) is not None:
            self._lag.observe(self._clock() - since)

    def attempt_begun(self, key: Hashable, *, waited: float | None) -> None:
        """Record that the status names a new attempt.

        `waited`: seconds since the job was created, if this is its first attempt and it waited only for the operator;
        else None.
        """
        self._begun[key] = ("later" if waited is None else "first", self._clock() - (waited or 0.0))

    def children_applied(self, key: Hashable) -> None:
        """Record that all children of the job's attempt are applied."""
        if (begun := self._begun.pop(key, None)) is not None:
            attempt, since = begun
            self._applied.labels(attempt).observe(self._clock() - since)

    def restarted(self, namespace: str, reason: str) -> None:
        """Record a restart of a job, or of one of its engines."""
        self._restarts.labels(namespace, label_of(reason)).inc()

    def requested(self, verb: str, kind: str, code: int | None) -> None:
        """Record a request to the API server and the status code of the answer; None: there was no answer."""
        self._requests.labels(verb, kind, "none" if code is None else str(code)).inc()

    def asked(self, *, answered: bool) -> None:
        """Record that a launcher was asked for its progress."""
        self._answers.labels("answered" if answered else "silent").inc()

    def listed(self, kind: str, reason: str) -> None:
        """Record that the mirror listed a kind."""
        self._lists.labels(kind, reason).inc()

    def looked_again(self, *, confirmed: bool) -> None:
        """Record that a plan from the mirror was made again from a live read."""
        self._second_looks.labels("confirmed" if confirmed else "outdated").inc()

    def gone(self, key: Hashable) -> None:
        """Forget a job that no longer exists."""
        self.jobs.gone(key)
        self._failing.discard(key)
        for kept in (self._noticed, self._in_pass):
            kept.pop(key, None)
        self._begun.pop(key, None)
