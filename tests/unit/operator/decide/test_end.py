"""Ends of a job: complete, past a deadline, deleted after its time to live."""

from dataclasses import replace

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.decide.conditions import find, holds, is_terminal, set_condition
from grpo_spec.reports import ExitCode, Progress
from support.control_plane.jobs import NOW, ended, pod
from support.control_plane.passes import A, B, Case, all_ready, failed


def test_an_attempt_that_does_not_start_in_time_fails_and_names_its_obstacle() -> None:
    case = Case(startupDeadlineSeconds=100)
    stuck = pod(B, node=None, unschedulable="0/2 nodes are available: Insufficient nvidia.com/gpu")
    case.see(pod(A), stuck, at=99)
    assert not is_terminal(case.status)
    case.see(pod(A), stuck, at=100)
    assert find(case.status, Condition.FAILED).reason == "StartupDeadlineExceeded"
    assert "Unschedulable: pod job-b-0: 0/2 nodes are available" in case.message(Condition.FAILED)


def test_restarts_do_not_reset_the_deadline_and_suspension_pauses_it() -> None:
    case, _ = all_ready(activeDeadlineSeconds=1000, failurePolicy={"backoffSeconds": 0})
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
    assert "the job has been active for 1000 s; spec.activeDeadlineSeconds is 1000" in case.message(Condition.FAILED)


def test_a_job_whose_deadline_passes_during_a_back_off_announces_no_further_attempt() -> None:
    case, pods = all_ready(activeDeadlineSeconds=100, failurePolicy={"backoffSeconds": 300})
    case.see(failed(A), pods[1], at=50)
    assert case.status.next_restart_time is not None
    case.see(at=100)
    assert (case.status.phase, case.status.next_restart_time) == ("Failed", None)


@pytest.mark.parametrize(
    ("storage", "then"),
    [
        ({"claimName": "data"}, "; another job goes on from {saved} with storage.resumeFrom ns/job/uid"),
        ({}, ""),  # it was on the pod's own disk
    ],
)
def test_a_job_that_failed_says_how_another_one_goes_on_from_its_checkpoint(storage: dict[str, str], then: str) -> None:
    case, pods = all_ready(failurePolicy={"maxRestarts": 0}, storage=storage)
    saved = "ns/job/uid/checkpoints/step-7"
    case.see(*pods, at=1, progress=Progress(step=8, total_steps=9, checkpoint_step=7, checkpoint=saved))
    case.see(failed(A), pods[1], at=2)
    said = f"failurePolicy.maxRestarts is 0{then.format(saved=saved)}"
    assert case.status.summary.message.endswith(said)


def test_a_job_that_finishes_while_it_is_suspended_is_complete() -> None:
    case, _ = all_ready()
    case.edit(suspend=True)
    case.see(failed(A, ExitCode.DONE, "Done"), failed(B, ExitCode.DONE, "Done"), at=10)
    assert holds(case.status, Condition.COMPLETE)
    assert not holds(case.status, Condition.SUSPENDED)


def test_an_ended_job_follows_edits_and_says_nothing_of_pods_that_are_gone() -> None:
    case, _ = all_ready()
    done = [failed(name, ExitCode.DONE, "Done") for name in (A, B)]
    case.see(*done, at=10)
    case.see(at=20)
    ended = case.status
    case.edit()
    case.job = replace(case.job, generation=2)
    case.see(at=30)
    assert case.status.observed_generation == 2
    assert {condition.observed_generation for condition in case.status.conditions} == {2}
    assert {group.ready for group in case.status.groups} == {0}
    kept = {"observed_generation", "conditions"}
    assert case.status.model_dump(exclude=kept) == ended.model_dump(exclude=kept)


def test_an_end_that_another_release_wrote_becomes_true() -> None:
    case, pods = all_ready(failurePolicy={"maxRestarts": 0})
    case.see(failed(A), pods[1], at=10)
    for kind in (Condition.SCHEDULED, Condition.RUNNING, Condition.HUNG):
        case.status = set_condition(case.status, kind, True, "Any", "", generation=1, now=NOW)
    case.see(at=20)
    assert [c.type for c in case.status.conditions if c.status == "True"] == ["Accepted", "Failed", "Stalled"]


def test_the_checkpoint_that_ranks_save_after_a_deadline_is_recorded() -> None:
    case, pods = all_ready(activeDeadlineSeconds=100)
    case.see(*pods, at=100)
    assert is_terminal(case.status)
    saved = Progress(step=7, total_steps=9, checkpoint_step=7, checkpoint="checkpoints/step-7")
    stopped = failed(A, ExitCode.STOPPED, "Stopped", at=110)
    stopped = replace(stopped, endings=(replace(stopped.endings[0], progress=saved),))
    case.see(stopped, pods[1], at=111)
    assert (case.status.checkpoint, case.status.progress.step) == ("checkpoints/step-7", 7)
    ends = {member.pod: member.outcome and member.outcome.reason for member in case.status.members}
    assert ends == {A: "Stopped", B: None}


def test_an_ended_job_is_deleted_after_its_time_to_live() -> None:
    case = Case(ttlSecondsAfterFinished=100)
    case.see(pod(A, outcome=ended(0)), pod(B, outcome=ended(0)))
    waiting = case.see(at=40)
    assert (waiting.delete_job, waiting.requeue_after) == (False, 60)
    assert case.see(at=100).delete_job
