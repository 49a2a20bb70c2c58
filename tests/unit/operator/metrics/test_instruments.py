"""The operator's metrics: passes, queue, status lag, children, restarts and jobs. The queue is real, passes are not."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from grpo_operator.metrics.instruments import Instruments
from grpo_operator.metrics.jobs import PHASES, WatchedJob
from grpo_operator.runtime.errors import ConflictError
from grpo_operator.runtime.workqueue import WorkQueue
from support.control_plane.virtual_time import in_virtual_time

OF_JOB = {"namespace": "ns", "grpojob": "job"}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"grpo_operator_{name}", labels)


def watched(phase: str, name: str = "job", **status: object) -> WatchedJob:
    return WatchedJob.read("ns", name, {"phase": phase, **status})


def _open() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@in_virtual_time
async def test_passes_are_counted_by_result_and_back_offs_while_they_last() -> None:
    instruments, outcomes = Instruments(), iter([RuntimeError("no luck"), ConflictError("changed"), 0.01, None])
    failing: list[float | None] = []

    async def work(_: str) -> float | None:
        failing.append(value(instruments.registry, "workqueue_backing_off"))
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    queue = WorkQueue(work, instruments, gate=_open())
    queue.wake("a")
    await asyncio.sleep(60)
    results = ("error", "conflict", "requeue_after", "success")
    counts = [value(instruments.registry, "reconcile_duration_seconds_count", result=result) for result in results]
    assert counts == [1.0, 1.0, 1.0, 1.0]
    assert failing == [0.0, 1.0, 0.0, 0.0]
    assert value(instruments.registry, "workqueue_retries_total") == 1.0
    assert value(instruments.registry, "workqueue_active") == 0.0
    await queue.close()


@in_virtual_time
async def test_depth_counts_passes_that_wait_for_a_slot() -> None:
    instruments, go = Instruments(), asyncio.Event()

    async def work(_: int) -> None:
        await go.wait()

    queue = WorkQueue(work, instruments, gate=_open(), limit=2)
    for key in range(5):
        queue.wake(key)
    await asyncio.sleep(60)
    assert value(instruments.registry, "workqueue_active") == 2.0
    assert value(instruments.registry, "workqueue_depth") == 3.0
    go.set()
    await asyncio.sleep(60)
    assert value(instruments.registry, "workqueue_depth") == 0.0
    assert value(instruments.registry, "workqueue_active") == 0.0
    await queue.close()


@in_virtual_time
async def test_depth_does_not_count_passes_cancelled_while_they_wait() -> None:
    instruments, never = Instruments(), asyncio.Event()
    queue = WorkQueue(lambda _: never.wait(), instruments, gate=_open(), limit=1)  # type: ignore[arg-type]
    for key in range(3):
        queue.wake(key)
    await asyncio.sleep(60)
    assert value(instruments.registry, "workqueue_depth") == 2.0
    await queue.close()
    assert value(instruments.registry, "workqueue_depth") == 0.0


def test_the_status_lag_counts_from_the_first_change_that_the_status_reflects() -> None:
    now = 0.0
    instruments = Instruments(clock=lambda: now)

    def one_pass(seconds: float, *, fails: bool = False, writes: bool = True) -> None:
        nonlocal now
        instruments.waiting()
        began = instruments.begin_pass("a")
        now += seconds
        if writes and not fails:
            instruments.status_written("a")
        instruments.end_pass("a", began, "error" if fails else "success")

    instruments.noticed("a")
    now = 1.0
    one_pass(2.0, fails=True)
    instruments.noticed("a")
    one_pass(4.0)
    lag = value(instruments.registry, "status_lag_seconds_sum")
    assert lag == 7.0, "it counts from the change that the failed pass noticed"
    instruments.noticed("a")
    one_pass(1.0, writes=False)
    one_pass(1.0)  # a write without a watched change has no lag
    assert value(instruments.registry, "status_lag_seconds_count") == 1.0


def test_children_are_timed_once_for_each_attempt() -> None:
    now = 100.0
    instruments = Instruments(clock=lambda: now)
    instruments.attempt_begun("a", waited=1.5)
    now += 1.0
    instruments.children_applied("a")
    instruments.children_applied("a")
    instruments.attempt_begun("a", waited=None)
    now += 4.0
    instruments.children_applied("a")
    assert value(instruments.registry, "children_applied_seconds_sum", attempt="first") == 2.5
    assert value(instruments.registry, "children_applied_seconds_count", attempt="first") == 1.0
    assert value(instruments.registry, "children_applied_seconds_sum", attempt="later") == 4.0


def test_reasons_that_pods_invent_share_one_label() -> None:
    instruments = Instruments()
    for number in range(100):
        instruments.restarted("ns", f"Invented{number}")
    instruments.restarted("ns", "NodeLost")
    assert value(instruments.registry, "restarts_total", namespace="ns", reason="Other") == 100.0
    assert value(instruments.registry, "restarts_total", namespace="ns", reason="NodeLost") == 1.0
    assert value(instruments.registry, "restarts_total", namespace="ns", reason="Invented1") is None


def test_an_operator_that_stands_by_shows_no_jobs() -> None:
    instruments = Instruments()
    instruments.jobs.seen("a", watched("Running"))
    assert (value(instruments.registry, "leader"), value(instruments.registry, "job_restarts", **OF_JOB)) == (0.0, None)
    instruments.leads()
    assert (value(instruments.registry, "leader"), value(instruments.registry, "job_restarts", **OF_JOB)) == (1.0, 0.0)


def test_gauges_of_jobs_follow_the_watch() -> None:
    instruments = Instruments()
    instruments.leads()
    more = {"reason": "R", "message": "m", "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    conditions = [{"type": "Accepted", "status": "True"} | more, {"type": "Running", "status": "False"} | more]
    usage = {"gpuSeconds": {"held": 9, "training": 7, "idle": 2}, "time": "2026-01-01T00:00:00Z"}
    instruments.jobs.seen("a", watched("Running", conditions=conditions, restarts={"total": 2}, usage=usage))
    instruments.jobs.seen("b", WatchedJob.read("ns", "new", {}))
    phases = {phase: value(instruments.registry, "jobs", namespace="ns", phase=phase) for phase in PHASES}
    assert phases == {phase: float(phase in ("Running", "Pending")) for phase in PHASES}
    assert value(instruments.registry, "job_restarts", **OF_JOB) == 2.0
    assert value(instruments.registry, "job_condition", condition="Accepted", **OF_JOB) == 1.0
    uses = [value(instruments.registry, "job_gpu_seconds", use=use, **OF_JOB) for use in ("training", "idle", "held")]
    assert uses == [7.0, 2.0, None], "so that their sum is what was held"
    assert value(instruments.registry, "job_condition", condition="Running", **OF_JOB) is None
    failure = {"reason": "Invented", "message": "m", "time": "2026-01-01T00:00:05Z"}
    instruments.jobs.seen("a", watched("Failed", completionTime="2026-01-01T00:00:10Z", lastFailure=failure))
    failed = value(instruments.registry, "job_last_failure_timestamp_seconds", reason="Other", **OF_JOB)
    assert failed == pytest.approx(1767225605)
    assert value(instruments.registry, "jobs", namespace="ns", phase="Running") == 0.0
    ended = value(instruments.registry, "job_completion_timestamp_seconds", phase="Failed", **OF_JOB)
    assert ended == pytest.approx(1767225610)
    instruments.gone("a")
    assert value(instruments.registry, "jobs", namespace="ns", phase="Failed") == 0.0
    assert value(instruments.registry, "job_restarts", **OF_JOB) is None
    instruments.gone("b")
    assert value(instruments.registry, "jobs", namespace="ns", phase="Pending") is None
