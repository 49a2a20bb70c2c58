"""Events beside a failure change neither its weight nor the course of the others."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.status import Disruption, Failure
from grpo_operator.api.times import after, seconds_between
from grpo_operator.decide.conditions import find
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import Mode
from grpo_operator.decide.repeats import named_if_repeated
from support.control_plane.jobs import NOW, ended, pod
from support.control_plane.passes import A, Case, all_ready, dead, engine, failed, trainers

KEY_ERROR = "rank 0 failed with exit code 1: KeyError: 'answer'"


def case_of(replicas: int, **elastic: int) -> Case:
    """Return a job with engines, all of which it needs unless `elastic` says otherwise."""
    server: dict[str, Any] = {"groups": [{"name": "gen", "gpus": 1, "replicas": replicas}]}
    if elastic:
        server = {"groups": [{"name": "gen", "gpus": 1}], "elastic": elastic | {"replicas": replicas}}
    policy = {"onGenerationFailure": "RestartGeneration", "maxRestarts": 3}
    return Case(generation={"topology": "Server", "server": server}, failurePolicy=policy)


def running(replicas: int, **elastic: int) -> tuple[Case, list[ObservedPod]]:
    """Return a job of which all pods are ready, and its trainer pods."""
    case = case_of(replicas, **elastic)
    case.see_all_ready()
    return case, trainers(case)


def test_engines_that_die_together_are_replaced_together_and_count_once() -> None:
    case, ranks = running(8)
    for at in range(5, 13):
        case.see(*ranks, *(dead(number, at=5) for number in range(8)), at=at)
    waits = {seconds_between(after(NOW, 5), one.replace_time or "") for one in case.status.members if one.replacing}
    assert (case.status.phase, len(waits), max(waits) <= 12) == ("Starting", 1, True)
    assert (case.status.restarts.total, case.status.restarts.counted) == (8, 1)
    assert case.status.recent_restarts.total == 1


def test_a_kubelet_that_refuses_the_next_pod_of_an_engine_counts_nothing() -> None:
    case, ranks = running(2)
    for at in (5, 6):
        case.see(*ranks, engine(0, ready=True), dead(1, at=5), at=at)
    for number in range(1, 8):
        refused = Ending(ended(-1, "UnexpectedAdmissionError", after(NOW, 20 + number)))
        next_pod = pod("job-gen-1", uid=f"job-gen-1-{number}", group="gen", endings=(refused,))
        case.see(*ranks, engine(0, ready=True), next_pod, at=20 + 3 * number)
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 1)
    case.see(*ranks, engine(0, ready=True), pod("job-gen-1", uid="job-gen-1-9", ready=True, group="gen"), at=60)
    assert case.status.phase == "Running"


@pytest.mark.parametrize("elastic", [{}, {"maxReplicas": 4}])
def test_a_dead_engine_takes_no_checkpoint_from_a_trainer_that_is_drained(elastic: dict[str, int]) -> None:
    case, ranks = running(2, **elastic)
    for at in (5, 6):
        case.see(*ranks, engine(0, ready=True), dead(1, at=5), at=at)
    drained = Disruption(reason="Evicted", message="the node is drained")
    leaves = replace(ranks[0], disruption=drained, deletion_time=after(NOW, 300))
    case.see(leaves, *ranks[1:], engine(0, ready=True), dead(1, at=5), at=7)
    assert (case.last.mode, case.status.phase) == (Mode.RUN, case.status.phase)
    assert find(case.status, Condition.RESTARTING) is None


def test_the_same_exception_is_repeated_only_right_after_and_at_a_step_that_is_known() -> None:
    case, pods = all_ready()
    case.see(failed(A, at=25), pods[1], at=25)
    last = case.status.last_failure
    failure = Failure(**last.model_dump() | {"message": KEY_ERROR, "reason": "RankFailed", "attempt": 1})

    def again(**changes: Any) -> str:
        before = failure.model_copy(update={"attempt": 0})
        status = case.status.model_copy(update={"last_failure": before, "attempt": 1, "running_time": None} | changes)
        return named_if_repeated(failure, status).reason

    assert again() == "RepeatedFailure"
    assert again(last_failure=failure.model_copy(update={"attempt": -1})) == "RankFailed", "an attempt lies between"
    assert again(recent_restarts=None) == "RankFailed", "it made progress since"
    assert again(running_time=NOW, progress=None) == "RankFailed", "no step was reported"


def test_a_stuck_engine_that_the_job_does_not_need_leaves_it_running_and_the_status_settles() -> None:
    case, ranks = running(2, maxReplicas=4)
    stuck = engine(1, deletion_time=after(NOW, 30))
    for at in (5, 200, 202):
        case.see(*ranks, engine(0, ready=True), stuck, at=at)
    assert case.status.phase == "Running"
    assert "job-gen-1 on node node did not end with its grace period" in case.message(Condition.RUNNING)
    needed, ranks = running(2)
    times = []
    for at in (5, 200, 202, 204):
        needed.see(*ranks, engine(0, ready=True), engine(1, deletion_time=after(NOW, 30)), at=at)
        condition = find(needed.status, Condition.SCHEDULED)
        times.append((condition.reason, condition.last_transition_time))
    assert times[-1] == times[-2] == times[-3]
    assert times[-1][0] == "PodStuck"
