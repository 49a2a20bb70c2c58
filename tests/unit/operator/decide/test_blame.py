"""One of several failures is named as the cause, and some of them count as restarts."""

from dataclasses import replace

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.status import Disruption
from grpo_operator.api.times import after
from grpo_operator.decide.conditions import find, holds, is_terminal
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_spec.reports import ExitCode, Progress
from support.control_plane.jobs import NOW, ended, pod
from support.control_plane.passes import SERVER, A, B, Case, all_ready, failed


def test_a_lost_peer_is_blamed_only_after_waiting_for_the_root_cause() -> None:
    lost = pod(A, outcome=ended(ExitCode.PEER_LOST, "PeerLost"))

    def case() -> Case:
        seen = Case(failurePolicy={"maxRestarts": 0})
        seen.see(lost, pod(B, ready=True))
        assert not is_terminal(seen.status)
        return seen

    silent = case()
    silent.see(lost, pod(B), at=44)
    assert not is_terminal(silent.status), "B may be on a lost node, which the cluster has not noticed yet"
    silent.see(lost, pod(B), at=45)
    assert find(silent.status, Condition.FAILED).reason == "PeerLost"

    culprit = case()
    culprit.see(lost, pod(B, outcome=ended(ExitCode.RANK_FAILED, "RankFailed", after(NOW, 1))), at=3)
    assert culprit.status.last_failure.pod == B


@pytest.mark.parametrize("clock", [3600, 0, -60], ids=["an hour ahead", "right", "a minute behind"])
def test_the_clock_of_a_node_decides_neither_how_long_is_waited_nor_who_is_blamed(clock: int) -> None:
    lost = failed(A, ExitCode.PEER_LOST, "PeerLost", at=100 + clock)
    case, pods = all_ready()
    case.see(lost, replace(pods[1], ready=False), at=100)
    assert case.status.phase == "Starting", "the culprit may be on a node that is lost"
    case.see(lost, replace(pods[1], ready=False), at=144)
    assert case.status.phase == "Starting"
    case.see(lost, replace(pods[1], ready=False), at=145)
    assert (case.status.phase, case.status.last_failure.time) == ("Restarting", after(NOW, 100))
    for first, second in ((A, B), (B, A)):
        case, _ = all_ready(failurePolicy={"maxRestarts": 0})
        one = replace(failed(first, ExitCode.PEER_LOST, "PeerLost", at=100), node="right")
        case.see(one, pod(second, uid=f"{second}-0"), at=100)
        case.see(one, replace(failed(second, at=102 + clock), node="wrong"), at=102)
        assert case.status.last_failure.pod == second


def test_of_failures_seen_in_one_pass_effects_come_last_and_only_times_of_one_node_are_compared() -> None:
    def blamed(*pods: ObservedPod) -> str | None:
        case = Case(**SERVER)
        names = {one.name for one in pods}
        nodes = {one.name: one.node for one in pods}
        first = [pod(name, uid=f"{name}-0", node=nodes.get(name, "node")) for name in case.topology.pods]
        case.see(*first)
        case.see(*pods, *(one for one in first if one.name not in names), at=50)
        return case.status.last_failure and case.status.last_failure.pod

    early, late = failed(B, at=10), failed(A, at=20)
    assert blamed(late, early) == B, "both are on one node"
    assert blamed(late, replace(early, node="behind")) == A, "in the order of ranks: their clocks say nothing"
    assert blamed(replace(late, node="ahead"), early) == A
    engine = failed("job-gen-1", reason="EngineDied", at=40)
    assert blamed(late, early, replace(engine, node="other")) == "job-gen-1", "the ranks may have lost it"
    assert blamed(late, early, engine) == B
    effect = failed(A, ExitCode.PEER_LOST, "PeerLost", at=1)
    assert blamed(effect, replace(early, node="ahead")) == B


def test_a_restarted_container_without_a_result_is_a_lost_outcome() -> None:
    case = Case(failurePolicy={"maxRestarts": 0})
    case.see(pod(A, restarts=1), pod(B))
    assert find(case.status, Condition.FAILED).reason == "OutcomeLost"


def test_an_eviction_is_named_and_not_counted_although_ranks_only_report_that_they_stopped() -> None:
    case, _ = all_ready()
    drain = Disruption(reason="Evicted", message="EvictionByEvictionAPI: drain")
    evicted = pod(B, uid=f"{B}-0", disruption=drain)
    noticed = case.see(pod(A, uid=f"{A}-0", ready=True), evicted)
    assert case.status.phase != "Restarting", "it still saves a checkpoint"
    assert f"pod {B} on node node is being taken away: EvictionByEvictionAPI: drain" in case.status.summary.message
    assert [(e.type, e.reason) for e in noticed.events] == [("Warning", "Evicted")]
    assert not case.see(pod(A, uid=f"{A}-0", ready=True), evicted).events
    stopped = case.see(failed(A, ExitCode.STOPPED, "Stopped"), evicted)
    assert [e.reason for e in stopped.events] == ["Restarting"]
    assert (case.status.phase, case.status.summary.reason) == ("Restarting", "Evicted")
    uncounted = "this restart does not count towards failurePolicy.maxRestarts"
    assert f"{uncounted}; next attempt not before" in case.status.summary.message
    assert case.status.last_failure.exit_code is None
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == (B, "Evicted")
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 0)


def test_a_deleted_pod_is_named_although_all_pods_report_secondary_failures() -> None:
    case, pods = all_ready()
    going = replace(pods[1], deletion_time=after(NOW, 60))
    case.see(pods[0], going, at=1)
    assert case.status.phase == "Running", "it still saves a checkpoint"
    early = replace(failed(B, ExitCode.STOPPED, "StoppedEarly", at=3), deletion_time=after(NOW, 60))
    case.see(failed(A, ExitCode.PEER_LOST, "PeerLost", at=2), early, at=4)
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == (B, "PodReplaced")
    assert "a user or another controller deleted it" in case.message(Condition.RESTARTING)


def test_a_hang_is_reported_with_the_phase_of_every_rank_and_no_answer_is_no_hang() -> None:
    case, pods = all_ready(failurePolicy={"hangSeconds": 100})
    stuck = Progress(step=7, total_steps=40, phase="Training", age_seconds=101, step_seconds=2)
    stuck = stuck.model_copy(update={"rank_phases": {"0": "Training for 101 s"}})
    case.see(*pods, at=1000)
    assert case.status.phase == "Running"
    case.see(*pods, at=1000, progress=stuck.model_copy(update={"step_seconds": 11}))
    assert case.status.phase == "Running", "ten slow steps take longer than that"
    case.see(*pods, at=1000, progress=stuck.model_copy(update={"phase": "Generating", "idle_seconds": 20}))
    assert case.status.phase == "Running", "a step may take long while ranks sample tokens"
    case.see(*pods, at=1000, progress=stuck.model_copy(update={"idle_seconds": 101}))
    assert holds(case.status, Condition.HUNG)
    said = "for 101 s (failurePolicy.hangSeconds), since step 7; rank 0: Training for 101 s"
    assert said in case.message(Condition.HUNG)
    assert case.status.last_failure.reason == "Hung"
    assert case.status.phase == "Restarting"
    case.see(at=2000)
    assert not holds(case.status, Condition.HUNG)
