"""The operator's decisions, one look at a time."""

from dataclasses import replace
from typing import Any

import pytest
from jobs import NOW, ended, observed, pod, world

from grpo_operator.jobstatus import Disruption, GRPOJobStatus
from grpo_operator.lifecycle import after
from grpo_operator.names import Condition
from grpo_operator.observe import ObservedPod
from grpo_operator.plan import CALM_SECONDS, POLL_SECONDS, Deletion, Plan, plan, refuse
from grpo_operator.status import find, holds, is_terminal
from grpo_workload.contract import ExitCode, Progress

JOB, TOPOLOGY = world()
A, B = (member.pod for member in TOPOLOGY.members)
SERVER = {
    "generation": {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 2, "gpus": 1}]}},
}


class Case:
    """A job under a failure policy, looked at again and again; `at` is seconds since its start."""

    def __init__(self, **spec: Any) -> None:
        self.job, self.topology = world(**spec)
        self.status = GRPOJobStatus()
        self.last: Plan = self.look()

    def look(self, *pods: ObservedPod, at: int = 0, progress: Progress | None = None, **more: Any) -> Plan:
        reports = {} if progress is None else {self.topology.members[0].pod: progress}
        self.last = plan(self.job, self.topology, self.status, observed(*pods, **more), reports, after(NOW, at))
        self.status = self.last.status
        return self.last

    def run(self, at: int = 0) -> list[ObservedPod]:
        """All pods of the attempt, ready, looked at once."""
        pods = [pod(name, uid=f"{name}-{self.status.epoch}", ready=True, epoch=self.status.epoch or 0) for name in self.topology.pods]
        self.look(*pods, at=at)
        return pods

    def message(self, kind: Condition) -> str:
        condition = find(self.status, kind)
        assert condition is not None
        return condition.message

    def edit(self, **spec: Any) -> None:
        """Another spec."""
        self.job, self.topology = world(**spec)


def failed(name: str, code: int = ExitCode.RANK_FAILED, reason: str = "RankFailed", at: int = 0, epoch: int = 0) -> ObservedPod:
    return pod(name, uid=f"{name}-{epoch}", outcome=ended(code, reason, after(NOW, at)), epoch=epoch)


def test_the_first_look_accepts_and_asks_for_the_children() -> None:
    first = Case().last
    assert first.status.epoch == 0
    assert first.replicas == "run"
    assert find(first.status, Condition.ACCEPTED).message == "3 ranks on 2 pods (a 1 x 2, b 1 x 1)"
    assert [e.reason for e in first.events] == ["Accepted", "RestartsFromStepZero"]


def test_nothing_is_made_while_an_earlier_job_of_the_name_still_has_children() -> None:
    waiting = plan(JOB, TOPOLOGY, GRPOJobStatus(), observed(foreign=("pod/job-a-0",)), {}, NOW)
    assert waiting.replicas == "keep"
    assert waiting.status.epoch is None
    assert "pod/job-a-0" in find(waiting.status, Condition.SCHEDULED).message


def test_running_once_every_pod_is_ready() -> None:
    case = Case()
    assert case.look(pod(A, ready=True), pod(B)).status.phase == "Starting"
    assert case.look(pod(A, ready=True), pod(B, ready=True)).status.phase == "Running"


def test_rank_0_says_whom_it_waits_for() -> None:
    case = Case()
    case.look(pod(A), pod(B), progress=Progress(phase="WaitingForPeers", waiting_for=("job-b-0: DNS: no such name",)))
    running = find(case.status, Condition.RUNNING)
    assert (running.status, running.reason) == ("False", "WaitingForPeers")
    assert "job-b-0: DNS" in running.message


def test_a_container_that_cannot_start_is_told_with_its_pod() -> None:
    case = Case()
    case.look(pod(A), replace(pod(B), waiting="ErrImagePull: no such image"))
    running = find(case.status, Condition.RUNNING)
    assert running.reason == "ContainerWaiting"
    assert running.message == f"pod {B} on node node: ErrImagePull: no such image"


def test_outcomes_are_recorded_at_first_sight_and_outlive_the_pod() -> None:
    case = Case()
    case.look(pod(A, outcome=ended(0)), pod(B, ready=True))
    two = case.look(pod(A, uid="another"), pod(B, outcome=ended(0)))
    assert holds(two.status, Condition.COMPLETE)
    assert two.replicas == "zero"


def test_a_lost_peer_is_the_verdict_only_after_a_while() -> None:
    lost = pod(A, outcome=ended(ExitCode.PEER_LOST, "PeerLost"))

    def case() -> Case:
        seen = Case(failurePolicy={"maxRestarts": 0})
        seen.look(lost, pod(B, ready=True))
        assert not is_terminal(seen.status)
        return seen

    silent = case()
    silent.look(lost, pod(B), at=44)
    assert not is_terminal(silent.status), "B may be on a lost node, which the cluster has not told yet"
    silent.look(lost, pod(B), at=45)
    assert find(silent.status, Condition.FAILED).reason == "PeerLost"

    culprit = case()
    culprit.look(lost, pod(B, outcome=ended(ExitCode.RANK_FAILED, "RankFailed", after(NOW, 1))), at=3)
    assert culprit.status.last_failure.pod == B


def test_a_restarted_container_without_a_result_is_a_lost_outcome() -> None:
    case = Case(failurePolicy={"maxRestarts": 0})
    case.look(pod(A, restarts=1), pod(B))
    assert find(case.status, Condition.FAILED).reason == "OutcomeLost"


def test_progress_is_written_on_a_new_step_and_not_too_often() -> None:
    def at(step: int) -> Progress:
        return Progress(step=step, total_steps=40, reward=0.123456)

    case = Case()
    pods = case.run()
    assert case.look(*pods, progress=at(1)).status.summary.step == "1/40"
    assert case.look(*pods, progress=at(2), at=9).status.progress.step == 1
    later = case.look(*pods, progress=at(2), at=10).status
    assert (later.progress.step, later.progress.reward) == (2, 0.1235)
    assert case.look(*pods, at=3600).status.progress == later.progress


def test_a_refusal_is_told_once() -> None:
    first = refuse(GRPOJobStatus(), 1, "InvalidSpec", "spec.model: wrong", NOW)
    assert [e.reason for e in first.events] == ["InvalidSpec"]
    again = refuse(first.status, 1, "InvalidSpec", "spec.model: wrong", NOW)
    assert again.status == first.status
    assert not again.events


def test_looking_twice_changes_nothing() -> None:
    case = Case()
    pods = case.run()
    once = case.look(*pods).status
    again = case.look(*pods, at=18_000)
    assert again.status == once
    assert not again.events


def test_a_job_that_nothing_happens_to_is_looked_at_less_often() -> None:
    case = Case(activeDeadlineSeconds=60)
    assert case.last.requeue_after == POLL_SECONDS
    pods = case.run()
    assert case.last.requeue_after == CALM_SECONDS
    assert case.look(*pods, at=5, progress=Progress()).requeue_after == POLL_SECONDS, "its first step is awaited"
    step = Progress(step=1, total_steps=9)
    assert case.look(*pods, at=9, progress=step).requeue_after == CALM_SECONDS
    assert case.look(*pods, at=57).requeue_after == 3, "the deadline is near"
    going = replace(pods[1], deletion_time=after(NOW, 90))
    assert case.look(pods[0], going, at=20).requeue_after == POLL_SECONDS
    assert Case().look(pods[0], replace(pods[1], ready=False)).requeue_after == POLL_SECONDS


def test_a_wait_between_attempts_is_slept_through_once_no_pod_is_left() -> None:
    case = Case(failurePolicy={"backoffSeconds": 1000, "maxBackoffSeconds": 1000})
    pods = case.run()
    assert case.look(failed(A), pods[1]).requeue_after == POLL_SECONDS
    assert case.look().requeue_after == CALM_SECONDS


def test_a_failure_ends_the_attempt_and_the_next_begins_when_nothing_is_left_and_the_wait_is_over() -> None:
    case = Case(failurePolicy={"backoffSeconds": 100})
    pods = case.run()
    stopped = case.look(failed(A, at=5), *pods[1:], at=6)
    assert stopped.replicas == "zero"
    assert stopped.status.phase == "Restarting"
    assert (stopped.status.restarts.total, stopped.status.restarts.counted) == (1, 1)
    assert "restart 1 of 3, not before 2026-01-01T00:0" in case.message(Condition.RESTARTING)
    assert [e.reason for e in stopped.events] == ["Restarting"]
    assert case.status.last_failure.epoch == 0
    assert case.look(*pods, at=300).status.epoch == 0, "a pod is left"
    assert case.look(at=50).status.epoch == 0, "the wait is not over"
    begun = case.look(at=130)
    assert (begun.status.epoch, begun.status.members, begun.replicas) == (1, (), "run")
    assert not holds(begun.status, Condition.RESTARTING)
    case.run(at=140)
    assert case.status.phase == "Running"


def test_waits_double_and_the_budget_ends_the_job() -> None:
    case = Case(failurePolicy={"backoffSeconds": 100, "maxBackoffSeconds": 250, "maxRestarts": 3})
    waits = []
    for number in range(3):
        at = 10_000 * number
        case.run(at=at)
        case.look(failed(A, at=at, epoch=number), at=at)
        waits.append(case.status.next_restart_time)
        case.look(at=at + 5000)
    seconds = [int(w[14:16]) * 60 + int(w[17:19]) - (10_000 * n) % 3600 for n, w in enumerate(waits)]
    for wait, expected in zip(seconds, (100, 200, 250), strict=True):
        assert expected * 0.8 <= wait <= expected * 1.2
    case.run(at=40_000)
    case.look(failed(A, at=40_000, epoch=3), pod(B, uid=f"{B}-3", epoch=3), at=40_000)
    assert find(case.status, Condition.FAILED).reason == "RankFailed"
    assert case.message(Condition.FAILED).endswith("all 3 restarts of failurePolicy.maxRestarts are used up")
    assert case.status.restarts.total == 3


def test_a_wrong_setting_is_not_tried_again() -> None:
    case = Case()
    case.run()
    case.look(failed(A, ExitCode.CONFIG_ERROR, "ConfigError"), pod(B))
    assert find(case.status, Condition.FAILED).reason == "ConfigError"
    assert "a restart would meet the same settings" in case.message(Condition.FAILED)


@pytest.mark.parametrize(
    ("rule", "terminal", "counted"),
    [
        ({"exitCodes": [70], "action": "Fail"}, True, 0),
        ({"exitCodes": [71], "action": "Fail"}, False, 1),
        ({"reasons": ["RankFailed"], "role": "trainer", "action": "RestartFree"}, False, 0),
        ({"role": "generation", "action": "Fail"}, False, 1),
    ],
)
def test_the_first_rule_that_matches_counts(rule: dict[str, Any], terminal: bool, counted: int) -> None:
    case = Case(failurePolicy={"rules": [{"name": "mine", **rule}, {"name": "other", "exitCodes": [71], "action": "RestartFree"}]})
    pods = case.run()
    case.look(failed(A), *pods[1:])
    assert is_terminal(case.status) == terminal
    assert case.status.restarts.counted == counted


def test_eviction_is_named_and_not_counted_although_the_ranks_only_say_that_they_stopped() -> None:
    case = Case()
    case.run()
    evicted = replace(pod(B, uid=f"{B}-0"), disruption=Disruption(reason="Evicted", message="EvictionByEvictionAPI: drain"))
    noticed = case.look(pod(A, uid=f"{A}-0", ready=True), evicted)
    assert case.status.phase != "Restarting", "it still saves a checkpoint"
    assert f"pod {B} on node node is being taken away: EvictionByEvictionAPI: drain" in case.status.summary.message
    assert [(e.type, e.reason) for e in noticed.events] == [("Warning", "Evicted")]
    assert not case.look(pod(A, uid=f"{A}-0", ready=True), evicted).events
    stopped = case.look(failed(A, ExitCode.STOPPED, "Stopped"), evicted)
    assert [e.reason for e in stopped.events] == ["Restarting"]
    assert (case.status.phase, case.status.summary.reason) == ("Restarting", "Evicted")
    assert "a restart that failurePolicy.maxRestarts does not count, not before" in case.status.summary.message
    assert case.status.last_failure.exit_code is None
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == (B, "Evicted")
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 0)


def test_a_pod_deleted_by_hand_is_named_and_counted() -> None:
    case = Case()
    pods = case.run()
    case.look(pods[0], pod(B, uid="another"))
    assert (case.status.last_failure.reason, case.status.restarts.counted) == ("PodReplaced", 1)


def test_a_pod_that_somebody_deletes_is_named_although_it_and_its_peers_tell_of_effects() -> None:
    case = Case()
    pods = case.run()
    going = replace(pods[1], deletion_time=after(NOW, 60))
    case.look(pods[0], going, at=1)
    assert case.status.phase == "Running", "it still saves a checkpoint"
    early = replace(failed(B, ExitCode.STOPPED, "StoppedEarly", at=3), deletion_time=after(NOW, 60))
    case.look(failed(A, ExitCode.PEER_LOST, "PeerLost", at=2), early, at=4)
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == (B, "PodReplaced")
    assert "somebody deleted it" in case.message(Condition.RESTARTING)


def test_the_pods_of_a_lost_node_are_deleted_by_force_and_the_next_attempt_prefers_others() -> None:
    case = Case()
    pods = case.run()
    silent = replace(pods[1], ready=False)
    since = {"node": after(NOW, 10)}
    waits = case.look(pods[0], silent, at=60, lost_nodes=since)
    assert case.status.phase != "Restarting"
    assert case.status.summary.reason == "NodeNotReady"
    message = case.status.summary.message
    assert f"node node of {B} has not been ready since {since['node']}" in message
    assert f"its pods are given up, and the job restarts, at {after(NOW, 70)} (failurePolicy.nodeLostSeconds)" in message
    assert [e.reason for e in waits.events] == ["NodeNotReady"]
    assert case.look(pods[0], silent, at=61, lost_nodes=since).status == waits.status, "nothing new is nothing to write"
    case.look(pods[0], silent, at=70, lost_nodes=since)
    assert "away from node if there is another node" in case.message(Condition.RESTARTING)
    failure = case.status.last_failure
    assert failure.reason == "NodeLost"
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 0)
    going = replace(silent, deletion_time=after(NOW, 370))
    assert case.look(going, at=72, lost_nodes=since).deletions == (Deletion(pod=B, uid=silent.uid, force=True),)
    case.look(at=100)
    assert case.status.epoch == 1
    assert [node.name for node in case.status.avoid_nodes] == ["node"]
    case.run(at=110)
    case.look(failed(A, epoch=1), at=4000)
    case.look(at=5000)
    assert case.status.avoid_nodes == ()


def test_a_lost_peer_whose_node_turns_out_to_be_lost_is_not_counted_after_all() -> None:
    case = Case()
    case.run()
    lost, silent = failed(A, ExitCode.PEER_LOST, "PeerLost"), pod(B, uid=f"{B}-0")
    case.look(lost, silent, at=50)
    silent = replace(silent, deletion_time=after(NOW, 400))
    assert (case.status.last_failure.reason, case.status.restarts.counted) == ("PeerLost", 1)
    case.look(silent, at=110, lost_nodes={"node": after(NOW, 45)})
    assert (case.status.last_failure.reason, case.status.restarts.counted, case.status.restarts.total) == ("NodeLost", 0, 1)
    again = case.look(silent, at=112, lost_nodes={"node": after(NOW, 45)})
    assert again.status.restarts.counted == 0
    assert not again.events


def test_a_pod_that_overstays_its_grace_is_deleted_by_force_whatever_is_known_of_nodes() -> None:
    case = Case()
    pods = case.run()
    case.look(failed(A), pods[1])
    stuck = replace(pods[1], deletion_time=after(NOW, 300))
    assert not case.look(stuck, at=360).deletions
    assert case.look(stuck, at=361).deletions == (Deletion(pod=B, uid=stuck.uid, force=True),)


def test_a_node_that_is_no_longer_there_is_told_once() -> None:
    case = Case()
    pods = case.run()
    silent = replace(pods[1], ready=False)
    first = case.look(pods[0], silent, at=60, lost_nodes={"node": after(NOW, 60)}, absent_nodes=frozenset({"node"}))
    assert f"node node of {B} is no longer there" in case.message(Condition.RUNNING)
    later = case.look(pods[0], silent, at=62, lost_nodes={"node": after(NOW, 62)}, absent_nodes=frozenset({"node"}))
    assert later.status == first.status


def test_pods_that_were_ready_and_are_not_are_named() -> None:
    case = Case()
    pods = case.run()
    case.look(pods[0], replace(pods[1], ready=False), at=5)
    assert case.message(Condition.RUNNING) == f"1 of 2 pods are ready; ready no longer: {B}"


def test_a_hang_is_told_with_what_every_rank_is_at_and_silence_is_not_one() -> None:
    case = Case(failurePolicy={"hangSeconds": 100})
    pods = case.run()
    stuck = Progress(step=7, total_steps=40, phase="Training", age_seconds=101, step_seconds=2, rank_phases={"0": "Training for 101 s"})
    case.look(*pods, at=1000)
    assert case.status.phase == "Running"
    case.look(*pods, at=1000, progress=stuck.model_copy(update={"step_seconds": 11}))
    assert case.status.phase == "Running", "ten slow steps take longer than that"
    case.look(*pods, at=1000, progress=stuck)
    assert holds(case.status, Condition.HUNG)
    assert "no step has been finished for 101 s, after step 7: rank 0: Training for 101 s" in case.message(Condition.HUNG)
    assert case.status.last_failure.reason == "Hung"
    assert case.status.phase == "Restarting"
    case.look(at=2000)
    assert not holds(case.status, Condition.HUNG)


def test_an_attempt_that_does_not_start_in_time_fails_with_its_obstacle() -> None:
    case = Case(startupDeadlineSeconds=100)
    stuck = replace(pod(B), node=None, unschedulable="0/2 nodes are available: Insufficient nvidia.com/gpu")
    case.look(pod(A), stuck, at=99)
    assert not is_terminal(case.status)
    case.look(pod(A), stuck, at=100)
    assert find(case.status, Condition.FAILED).reason == "StartupDeadlineExceeded"
    assert "Unschedulable: pod job-b-0: 0/2 nodes are available" in case.message(Condition.FAILED)


def test_the_deadline_does_not_begin_anew_with_a_restart_and_pauses_while_suspended() -> None:
    case = Case(activeDeadlineSeconds=1000, failurePolicy={"backoffSeconds": 0})
    case.run()
    case.look(failed(A), at=400)
    case.look(at=401)
    case.run(at=402)
    case.edit(activeDeadlineSeconds=1000, suspend=True)
    case.look(at=500)
    assert case.status.active_seconds == 500
    case.look(at=90_000)
    case.edit(activeDeadlineSeconds=1000)
    case.look(at=100_000)
    assert case.status.epoch == 2
    assert not is_terminal(case.look(at=100_499).status)
    case.look(at=100_500)
    assert find(case.status, Condition.FAILED).reason == "DeadlineExceeded"
    assert "the job was active for 1000 s" in case.message(Condition.FAILED)


def test_suspension_ends_trainers_first_engines_after_and_goes_on_in_another_attempt() -> None:
    case = Case(**SERVER)
    pods = case.run()
    case.edit(**SERVER, suspend=True)
    saving = case.look(*pods, at=10)
    assert (saving.replicas, saving.status.phase) == ("engines", "Suspended")
    assert find(saving.status, Condition.SUSPENDED).reason == "Suspending"
    engines = [one for one in pods if "gen" in one.name]
    assert case.look(*engines, at=20).replicas == "zero"
    case.look(at=30)
    assert find(case.status, Condition.SUSPENDED).reason == "Suspended"
    assert case.status.epoch == 0
    case.edit(**SERVER)
    resumed = case.look(at=40)
    assert (resumed.status.epoch, resumed.status.restarts.total, resumed.replicas) == (1, 0, "run")


def test_a_job_suspended_from_the_start_makes_nothing_until_it_is_not() -> None:
    case = Case(suspend=True)
    assert (case.last.replicas, case.status.phase, case.status.epoch) == ("keep", "Suspended", None)
    case.edit()
    assert case.look(at=10).status.epoch == 0


def test_a_job_that_finishes_while_it_is_suspended_is_complete() -> None:
    case = Case()
    case.run()
    case.edit(suspend=True)
    case.look(failed(A, ExitCode.DONE, "Done"), failed(B, ExitCode.DONE, "Done"), at=10)
    assert holds(case.status, Condition.COMPLETE)
    assert not holds(case.status, Condition.SUSPENDED)


def test_an_engine_alone_is_made_anew() -> None:
    policy = {"failurePolicy": {"onGenerationFailure": "RestartGeneration", "maxRestarts": 1}}
    case = Case(**SERVER, **policy)
    pods = case.run()
    died = failed("job-gen-1", ExitCode.RANK_FAILED, "EngineDied")
    others = [one for one in pods if one.name != "job-gen-1"]
    first = case.look(*others, died)
    assert first.replicas == "run"
    assert first.deletions == (Deletion(pod="job-gen-1", uid="job-gen-1-0", force=False),)
    assert [e.reason for e in first.events] == ["EngineRestarting"]
    assert {group.name: group.incarnation for group in case.status.groups} == {"a": 0, "b": 0, "gen": 1}
    assert not case.look(*others, replace(died, deletion_time=after(NOW, 300))).deletions
    back = case.look(*others, pod("job-gen-1", uid="new"), at=60)
    assert not back.deletions
    assert {m.pod: m.uid for m in case.status.members}["job-gen-1"] == "new"
    case.look(*others, pod("job-gen-1", uid="new", ready=True), at=90)
    assert case.status.phase == "Running"
    assert (case.status.epoch, case.status.restarts.total) == (0, 1)
    case.look(*others, replace(died, uid="new"), at=120)
    assert find(case.status, Condition.FAILED).reason == "EngineDied"


def test_an_engine_whose_pod_was_replaced_by_another_is_taken_as_it_is() -> None:
    case = Case(**SERVER, failurePolicy={"onGenerationFailure": "RestartGeneration"})
    pods = case.run()
    replaced = [pod(one.name, uid="new") if one.name == "job-gen-0" else one for one in pods]
    case.look(*replaced)
    case.look(*replaced)
    assert (case.status.epoch, case.status.phase) == (0, "Starting")
    assert {m.pod: (m.uid, m.replacing) for m in case.status.members}["job-gen-0"] == ("new", False)


def test_an_ended_job_is_deleted_when_its_time_is_over() -> None:
    case = Case(ttlSecondsAfterFinished=100)
    case.look(pod(A, outcome=ended(0)), pod(B, outcome=ended(0)))
    waiting = case.look(at=40)
    assert (waiting.delete_job, waiting.requeue_after) == (False, 60)
    assert case.look(at=100).delete_job


def test_a_pod_of_an_earlier_attempt_is_deleted_and_never_recorded() -> None:
    case = Case(failurePolicy={"backoffSeconds": 0})
    case.run()
    case.look(failed(A))
    case.look(at=1)
    assert case.status.epoch == 1
    late = case.look(pod(A, uid="late", epoch=0, ready=True), at=2)
    assert late.deletions == (Deletion(pod=A, uid="late", force=False),)
    assert case.status.members == ()
