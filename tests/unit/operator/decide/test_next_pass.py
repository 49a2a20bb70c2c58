"""The time until the next pass."""

from dataclasses import replace
from typing import Any

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus, PlacementStatus
from grpo_operator.api.times import after, seconds_between
from grpo_operator.decide.conditions import Draft
from grpo_operator.decide.next_pass import CALM_SECONDS, POLL_SECONDS, is_quiet
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.placement import ends
from grpo_operator.decide.plan import Obstacle, plan
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress
from support.control_plane.jobs import NOW, observed, pod
from support.control_plane.passes import A, Case, all_ready, failed


def test_a_calm_job_gets_passes_less_often() -> None:
    case = Case(activeDeadlineSeconds=60)
    assert case.last.requeue_after == POLL_SECONDS
    pods = case.see_all_ready()
    assert case.last.requeue_after == CALM_SECONDS
    assert case.see(*pods, at=5, progress=Progress()).requeue_after == POLL_SECONDS, "its first step is awaited"
    step = Progress(step=1, total_steps=9)
    assert case.see(*pods, at=9, progress=step).requeue_after == CALM_SECONDS
    assert case.see(*pods, at=57).requeue_after == 3, "the deadline is near"
    going = replace(pods[1], deletion_time=after(NOW, 90))
    assert case.see(pods[0], going, at=20).requeue_after == POLL_SECONDS
    assert Case().see(pods[0], replace(pods[1], ready=False)).requeue_after == POLL_SECONDS


def seconds(case: Case, *pods: ObservedPod, at: int = 9, least: float = 60.0, **seen: Any) -> float | None:
    """Return when the next pass comes, at least so many seconds later, unless something is urgent."""
    there, now, reports = observed(*pods, **seen), after(NOW, at), {A: Progress()}
    return plan(case.job, case.topology, case.status, there, reports, now, least=least).requeue_after


def test_where_there_are_many_jobs_each_gets_fewer_passes_while_nothing_is_urgent() -> None:
    case, pods = all_ready(activeDeadlineSeconds=99)
    assert seconds(case, *pods) == 60, "also while its first step is awaited"
    assert seconds(case, *pods, at=90) == 9, "the deadline is near"
    assert seconds(case, failed(A), pods[1]) == POLL_SECONDS, "it ends"


def test_an_attempt_that_starts_gets_a_pass_at_each_of_its_deadlines() -> None:
    case = Case(startupDeadlineSeconds=900, failurePolicy={"nodeLostSeconds": 40})
    pods = [pod(name, uid=name, attempt=0) for name in case.topology.pods]
    assert seconds(case, *pods, least=99999.0) == 891
    assert seconds(case, *pods, least=99999.0, lost_nodes={pods[0].node: after(NOW, 5)}) == 36
    case.see(pods[0], replace(pods[1], node=None), at=10)
    until = ends(case.job, case.status, PlacementStatus(placed=1, since=after(NOW, 10)))
    wait = seconds(case, pods[0], replace(pods[1], node=None), at=12, least=99999.0)
    assert wait == seconds_between(after(NOW, 12), until)


def test_passes_are_rare_during_the_wait_once_all_pods_are_gone() -> None:
    case, pods = all_ready(failurePolicy={"backoffSeconds": 1000, "maxBackoffSeconds": 1000})
    assert case.see(failed(A), pods[1]).requeue_after == POLL_SECONDS
    assert case.see().requeue_after == CALM_SECONDS


def test_a_suspended_job_without_pods_is_not_looked_at() -> None:
    case, pods = all_ready()
    case.edit(suspend=True)
    assert case.see(*pods, at=5).requeue_after == CALM_SECONDS
    assert case.see(at=6).requeue_after is None


def test_a_job_that_stays_refused_is_looked_at_less_often() -> None:
    case = Case()
    case.status = GRPOJobStatus()
    missing = Obstacle(Reason.CLAIM_NOT_FOUND, "no claim")
    assert [case.see(at=at, obstacle=missing).requeue_after for at in (0, 300, 9999)] == [10, 30, 60]


def test_passes_are_skipped_only_over_an_attempt_that_nothing_disturbs() -> None:
    case, pods = all_ready(failurePolicy={"backoffSeconds": 100})
    going = replace(pods[1], deletion_time=after(NOW, 90))
    assert is_quiet(case.status, observed(*pods))
    assert not is_quiet(case.status, observed(pods[0], going))
    assert not is_quiet(case.status, observed(*pods, lost_nodes={"node": NOW}))
    assert not is_quiet(case.status, observed(*pods, absent_nodes=frozenset({"node"})))
    assert not is_quiet(case.status, observed(*pods, ready_nodes=frozenset({"node"})))
    draft = Draft(case.status, case.job, NOW)
    draft.set(Condition.BLOCKED, True, Reason.PASS_FAILED, "a pass over the job failed")
    assert not is_quiet(draft.status, observed(*pods))
    assert not is_quiet(case.see(failed(A, at=5), *pods[1:], at=5).status, observed()), "it waits to begin again"
    paused, pods = all_ready()
    paused.edit(suspend=True)
    assert not is_quiet(paused.see(*pods, at=5).status, observed(*pods))
    paused.see(at=9)
    assert not is_quiet(paused.see(at=9).status, observed()), "it rests"
    assert not is_quiet(GRPOJobStatus(), observed())
