"""Restarts are forgotten after progress, wait ever longer without it, and end a job that they would not help."""

from dataclasses import replace

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.status import Disruption, read_status
from grpo_operator.api.times import after, seconds_between
from grpo_operator.decide.conditions import find
from grpo_operator.decide.observed_pod import Ending
from grpo_spec.reports import ExitCode, Progress
from grpo_spec.schema import dump
from support.control_plane.jobs import NOW, ended, pod, pod_as_read
from support.control_plane.passes import SERVER, A, B, Case, all_ready, failed

WEEK = 7 * 86_400
KEY_ERROR = "rank {} failed with exit code 1: KeyError: 'answer'\n  File 'reward.py', line 3\nKeyError: 'answer'"


def steps(number: int) -> Progress:
    return Progress(step=number, total_steps=1000)


def fail(
    case: Case, at: int, step: int, message: str = "said RankFailed", node: str = "node", reason: str = "RankFailed"
) -> float:
    """Let an attempt begin, reach a step and fail on a node. Return the seconds of the wait; -1 if the job ends."""
    if case.status.phase == "Restarting":
        case.see(at=at)
    attempt = case.status.attempt or 0
    pods = [pod(name, uid=f"{name}-{attempt}", ready=True, attempt=attempt) for name in (A, B)]
    first = replace(pods[0], node=node)
    case.see(first, pods[1], at=at)
    case.see(first, pods[1], at=at + 20, progress=steps(step))
    ends = ended(70, reason, after(NOW, at + 40)).model_copy(update={"message": message})
    case.see(replace(first, ready=False, endings=(Ending(ends, attempt),)), pods[1], at=at + 40)
    due = case.status.next_restart_time
    return seconds_between(after(NOW, at + 40), due) if due is not None else -1.0


def test_failures_that_are_weeks_and_many_steps_apart_never_end_a_job() -> None:
    case = Case()
    for number in range(6):
        assert fail(case, WEEK * number, step=100 * number) <= 12, "the wait begins anew too"
        assert (case.status.restarts.counted, case.status.restarts.total) == (1, number + 1)
        assert case.status.recent_restarts.total == 1


def test_a_job_that_fails_again_and_again_at_the_same_step_makes_no_progress() -> None:
    """Each attempt repeats steps since the last checkpoint; these are not new."""
    case = Case(failurePolicy={"maxRestarts": 3, "maxBackoffSeconds": 25})
    waits = [fail(case, WEEK * number, step=57) for number in range(3)]
    assert waits == pytest.approx([10, 20, 25], rel=0.2)
    fail(case, WEEK * 3, step=66)
    assert find(case.status, Condition.FAILED).reason == "RankFailed"
    assert case.message(Condition.FAILED).endswith("all 3 restarts of failurePolicy.maxRestarts are used up")
    assert case.status.restarts.total == 3


def test_steps_add_up_over_restarts_and_the_field_says_how_many() -> None:
    for new, forgotten in ((5, False), (6, True)):
        case = Case(failurePolicy={"maxRestarts": 2, "recoverySteps": 16})
        for number, step in enumerate((20, 30, 30 + new)):
            fail(case, WEEK * number, step=step)
        assert (case.status.phase == "Failed") != forgotten
    case = Case(failurePolicy={"maxRestarts": 1, "recoverySteps": 0})
    for number in range(2):
        fail(case, WEEK * number, step=500 * number)
    assert case.status.phase == "Failed", "0: never forgotten"


def test_an_attempt_that_had_come_further_than_was_known_has_made_no_progress() -> None:
    """Steps that rank 0 reports only as its pod ends belong to the attempt that failed."""
    case, pods = all_ready()
    case.see(*pods, at=20, progress=steps(10))
    case.see(failed(A, at=25), pods[1], at=25)
    assert case.status.recent_restarts is not None
    case.see(failed(A, at=25), pods[1], at=36, progress=steps(31))
    case.see(at=100)
    case.see_all_ready(at=110)
    assert (case.status.restarts.counted, case.status.recent_restarts.step) == (1, 31)
    case.see(*case.see_all_ready(at=120), at=130, progress=steps(41))
    assert (case.status.restarts.counted, case.status.recent_restarts) == (0, None)


def test_a_status_of_a_release_that_forgot_nothing_is_read_and_progress_counts_from_then() -> None:
    case = Case(failurePolicy={"maxRestarts": 3})
    fail(case, 0, step=20)
    old = dump(case.status)
    del old["recentRestarts"], old["failedNodes"]
    old["restarts"] = {"total": 5, "counted": 3}
    old["lastFailure"].pop("step")
    case.status = read_status(old)
    case.see(at=WEEK)
    pods = case.see_all_ready(at=WEEK)
    case.see(*pods, at=WEEK + 20, progress=steps(29))
    assert case.status.restarts.counted == 3
    case.see(*pods, at=WEEK + 40, progress=steps(30))
    assert (case.status.restarts.counted, case.status.restarts.total) == (0, 5)
    case.status = read_status(old)
    assert fail(case, WEEK, step=20) == -1, "and they count until then"
    assert case.status.phase == "Failed"


def test_a_wait_doubles_after_failures_that_do_not_count_too() -> None:
    case, waits = Case(failurePolicy={"maxRestarts": 1}), []
    drained = Disruption(reason="Evicted", message="EvictionByEvictionAPI: drain")
    for number in range(8):
        at = 10_000 * number
        pods = case.see_all_ready(at=at)
        stopped = failed(A, ExitCode.STOPPED, "Stopped", at=at + 1, attempt=number)
        case.see(stopped, replace(pods[1], disruption=drained), at=at + 1)
        assert (case.status.phase, case.status.restarts.counted) == ("Restarting", 0)
        waits.append(seconds_between(after(NOW, at + 1), case.status.next_restart_time or ""))
        case.see(at=at + 9999)
    assert waits == pytest.approx([10, 20, 40, 80, 160, 320, 600, 600], rel=0.2)


def test_engines_that_restart_alone_wait_on_the_same_path_as_attempts() -> None:
    policy = {"onGenerationFailure": "RestartGeneration", "maxRestarts": 9}
    case, waits, at = Case(**SERVER, failurePolicy=policy), [], 10
    others = [one for one in case.see_all_ready() if one.name != "job-gen-1"]
    for number in range(4):
        died = replace(failed("job-gen-1", reason="EngineDied", at=at), uid=f"job-gen-1-{number}")
        case.see(*others, died, at=at)
        due = next(one.replace_time for one in case.status.members if one.replacing)
        waits.append(seconds_between(after(NOW, at), due))
        assert case.last.requeue_after <= waits[-1]
        at += 1000
        case.see(*others, pod("job-gen-1", uid=f"job-gen-1-{number + 1}"), at=at)
    case.see(failed(A, at=at), *others[1:], pod("job-gen-1", uid="job-gen-1-4"), at=at)
    waits.append(seconds_between(after(NOW, at), case.status.next_restart_time or ""))
    assert waits == pytest.approx([10, 20, 40, 80, 160], rel=0.2)


def test_an_eviction_for_a_limit_of_the_pods_own_counts_and_one_for_the_nodes_need_does_not() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    said = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'
    for conditions, counted in (([], 1), ([target], 0)):
        case, pods = all_ready()
        case.see(pods[0], pod_as_read(B, phase="Failed", reason="Evicted", message=said, conditions=conditions), at=5)
        assert (case.status.phase, case.status.last_failure.reason) == ("Restarting", "Evicted")
        assert case.status.last_failure.pod == B
        assert (case.status.restarts.counted, case.status.last_failure.counted) == (counted, bool(counted))


def test_an_exception_that_comes_again_at_the_same_step_ends_the_job_and_is_named_as_repeated() -> None:
    case = Case()
    fail(case, 0, 12, KEY_ERROR.format(0))
    assert case.status.last_failure.step == 12
    fail(case, WEEK, 12, KEY_ERROR.format(3))
    assert (case.status.phase, case.status.summary.reason) == ("Failed", "RepeatedFailure")
    assert case.status.last_failure.reason == "RepeatedFailure"
    assert "KeyError: 'answer'" in case.message(Condition.FAILED)
    said = "repeated: the attempt before ended with the same exception at the same step"
    assert said in case.message(Condition.FAILED)
    assert case.status.restarts.total == 1


MESSAGES = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB",
    "MemoryError: ",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "RewardError: rewards[judge]: http://judge:8000 did not answer",
    "OSError: [Errno 5] Input/output error: '/data/x'",
    "RewardError: rewards[f] took longer than its time: timed out",
    "EngineError: engine job-gen-0 is lost",
    "was killed by SIGKILL (probably out of memory: raise resources.limits.memory)",
]


@pytest.mark.parametrize("said", MESSAGES)
def test_memory_the_network_storage_and_engines_are_tried_again_whatever_they_say(said: str) -> None:
    case = Case()
    for number in range(3):
        fail(case, WEEK * number, 12, f"rank 0 failed with exit code 1: {said}")
    assert (case.status.phase, case.status.restarts.counted) == ("Restarting", 3)


def test_another_step_or_another_text_is_no_repetition_and_a_rule_may_go_on() -> None:
    case = Case(failurePolicy={"recoverySteps": 0, "maxRestarts": 9})
    for number, (step, text) in enumerate([(12, "a"), (13, "a"), (13, "b"), (12, "b")]):
        fail(case, WEEK * number, step, f"rank 0 failed with exit code 1: KeyError: '{text}'")
    assert case.status.restarts.counted == 4
    for reason in ("RankFailed", "RepeatedFailure"):
        rule = {"name": "again", "reasons": [reason], "action": "Restart"}
        case = Case(failurePolicy={"rules": [rule]})
        for number in range(3):
            fail(case, WEEK * number, 12, KEY_ERROR.format(number))
        assert case.status.restarts.counted == 3


def test_a_node_on_which_two_attempts_failed_is_avoided_for_a_time_and_said() -> None:
    case = Case(failurePolicy={"maxRestarts": 9})
    fail(case, 0, 5, node="bad")
    assert case.status.avoid_nodes == ()
    fail(case, WEEK, 6, node="good")
    fail(case, 2 * WEEK, 7)
    assert case.status.avoid_nodes == ()
    fail(case, 3 * WEEK, 8, node="bad")
    assert [(one.name, one.until) for one in case.status.avoid_nodes] == [("bad", after(NOW, 3 * WEEK + 1840))]
    assert "on other nodes than bad if possible, where pods have failed 2 times" in case.message(Condition.RESTARTING)
    case.see(at=3 * WEEK + 4000)
    assert case.status.avoid_nodes == ()


def test_progress_clears_a_node() -> None:
    case = Case()
    fail(case, 0, 5, node="n")
    fail(case, WEEK, 50, node="n")
    assert [(one.name, one.failures) for one in case.status.failed_nodes] == [("n", 1)]
    assert case.status.avoid_nodes == ()


def test_lost_episodes_say_nothing_about_the_node_of_the_rank_that_reports_them() -> None:
    case = Case(failurePolicy={"maxRestarts": 9})
    for number in range(3):
        fail(case, WEEK * number, 5, node="n", reason="EnvironmentFailed")
    assert (case.status.failed_nodes, case.status.avoid_nodes) == ((), ())
