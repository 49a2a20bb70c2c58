"""How a job ends: complete, past a deadline, deleted after its time to live."""

from dataclasses import replace

from grpo_operator.api.names import Condition
from grpo_operator.decide.conditions import find, holds, is_terminal
from grpo_workload.spec.contract import ExitCode
from support.control_plane.jobs import ended, pod
from support.control_plane.passes import A, B, Case, failed


def test_an_attempt_that_does_not_start_in_time_fails_and_names_its_obstacle() -> None:
    case = Case(startupDeadlineSeconds=100)
    stuck = replace(pod(B), node=None, unschedulable="0/2 nodes are available: Insufficient nvidia.com/gpu")
    case.see(pod(A), stuck, at=99)
    assert not is_terminal(case.status)
    case.see(pod(A), stuck, at=100)
    assert find(case.status, Condition.FAILED).reason == "StartupDeadlineExceeded"
    assert "Unschedulable: pod job-b-0: 0/2 nodes are available" in case.message(Condition.FAILED)


def test_restarts_do_not_reset_the_deadline_and_suspension_pauses_it() -> None:
    case = Case(activeDeadlineSeconds=1000, failurePolicy={"backoffSeconds": 0})
    case.see_all_ready()
    case.see(failed(A), at=400)
    case.see(at=401)
    case.see_all_ready(at=402)
    case.edit(activeDeadlineSeconds=1000, suspend=True)
    case.see(at=500)
    assert case.status.active_seconds == 500
    case.see(at=90_000)
    case.edit(activeDeadlineSeconds=1000)
    case.see(at=100_000)
    assert case.status.attempt == 2
    assert not is_terminal(case.see(at=100_499).status)
    case.see(at=100_500)
    assert find(case.status, Condition.FAILED).reason == "DeadlineExceeded"
    assert "the job has been active for 1000 s" in case.message(Condition.FAILED)


def test_a_job_that_finishes_while_it_is_suspended_is_complete() -> None:
    case = Case()
    case.see_all_ready()
    case.edit(suspend=True)
    case.see(failed(A, ExitCode.DONE, "Done"), failed(B, ExitCode.DONE, "Done"), at=10)
    assert holds(case.status, Condition.COMPLETE)
    assert not holds(case.status, Condition.SUSPENDED)


def test_an_ended_job_is_deleted_after_its_time_to_live() -> None:
    case = Case(ttlSecondsAfterFinished=100)
    case.see(pod(A, outcome=ended(0)), pod(B, outcome=ended(0)))
    waiting = case.see(at=40)
    assert (waiting.delete_job, waiting.requeue_after) == (False, 60)
    assert case.see(at=100).delete_job
