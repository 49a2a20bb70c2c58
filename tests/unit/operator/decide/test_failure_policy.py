"""Answers of `failurePolicy` to a failure: rules, the budget of restarts, the wait between them, one engine alone."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.times import after
from grpo_operator.decide.conditions import find, is_terminal
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.plan import Deletion, Mode
from grpo_operator.layout.contracts import make_contract
from grpo_spec.reports import ExitCode
from support.control_plane.jobs import NOW, pod
from support.control_plane.passes import SERVER, A, B, Case, all_ready, failed


def test_after_out_of_memory_micro_batches_are_halved_and_three_restarts_do_not_count() -> None:
    spec = {"training": {"maxTokensPerMicroBatch": 8000, "perDeviceTrainBatchSize": 3}}
    case = Case(**spec, failurePolicy={"maxRestarts": 1, "backoffSeconds": 0})
    budgets = []
    for number in range(4):
        at = 1000 * number
        case.see_all_ready(at=at)
        stopped = case.see(failed(A, reason="OutOfMemory", at=at, attempt=number), at=at)
        assert stopped.status.restarts.counted == (0 if number < 3 else 1)
        if number < 3:
            tokens = 8000 >> (number + 1)
            assert f"; micro-batches are halved, to {tokens} tokens; next attempt" in case.message(Condition.RESTARTING)
            assert [(event.type, event.reason) for event in stopped.events] == [("Warning", "Restarting")]
        case.see(at=at + 500)
        job = replace(case.job, micro_batch_halvings=case.status.micro_batch_halvings)
        training = make_contract(job, case.topology, case.status.attempt).config.training
        budgets.append((training.max_tokens_per_micro_batch, training.per_device_train_batch_size))
    assert budgets == [(4000, 1), (2000, 1), (1000, 1), (1000, 1)]
    case.see_all_ready(at=5000)
    case.see(failed(A, reason="OutOfMemory", at=5000, attempt=4), at=5000)
    assert find(case.status, Condition.FAILED).reason == "OutOfMemory"


def test_micro_batches_that_ranks_choose_are_halved_by_them() -> None:
    case, _ = all_ready()
    case.see(failed(A, reason="OutOfMemory"))
    assert "; micro-batches are halved; next attempt" in case.message(Condition.RESTARTING)
    contract = make_contract(replace(case.job, micro_batch_halvings=1), case.topology, 1)
    assert (contract.config.training.max_tokens_per_micro_batch, contract.micro_batch_halvings) == (None, 1)


@pytest.mark.parametrize("rule", ["Fail", "Restart", "RestartFree"])
def test_a_rule_about_out_of_memory_decides_whether_it_counts(rule: str) -> None:
    case, _ = all_ready(failurePolicy={"rules": [{"name": "mine", "reasons": ["OutOfMemory"], "action": rule}]})
    case.see(failed(A, reason="OutOfMemory"))
    assert is_terminal(case.status) == (rule == "Fail")
    assert case.status.restarts.counted == (rule == "Restart")
    assert case.status.micro_batch_halvings == (rule != "Fail")


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        (ExitCode.CONFIG_ERROR, "ConfigError", "a restart would fail on the same settings"),
        (ExitCode.RANK_FAILED, "WeightsDiffer", "would push the same weights"),
        (ExitCode.RANK_FAILED, "NotFinite", ""),
    ],
)
def test_what_a_restart_would_not_help_ends_the_job(code: int, reason: str, says: str) -> None:
    case, _ = all_ready()
    case.see(failed(A, code, reason), pod(B))
    assert find(case.status, Condition.FAILED).reason == reason
    assert says in case.message(Condition.FAILED)


@pytest.mark.parametrize("most", [1, 0])
def test_lost_environments_are_tried_again_until_restarts_are_used_up(most: int) -> None:
    case, _ = all_ready(failurePolicy={"maxRestarts": most})
    case.see(failed(A, reason="EnvironmentFailed"), pod(B))
    assert (is_terminal(case.status), case.status.restarts.counted) == (most == 0, most)
    assert case.status.last_failure.reason == "EnvironmentFailed"


@pytest.mark.parametrize(
    ("reason", "rule", "terminal", "counted"),
    [
        ("RankFailed", {"exitCodes": [70], "action": "Fail"}, True, 0),
        ("RankFailed", {"exitCodes": [71], "action": "Fail"}, False, 1),
        ("RankFailed", {"reasons": ["RankFailed"], "role": "trainer", "action": "RestartFree"}, False, 0),
        ("RankFailed", {"role": "generation", "action": "Fail"}, False, 1),
        ("NotFinite", {"reasons": ["NotFinite"], "action": "Restart"}, False, 1),
    ],
)
def test_the_first_rule_that_matches_decides(reason: str, rule: dict[str, Any], terminal: bool, counted: int) -> None:
    rules = [{"name": "mine", **rule}, {"name": "other", "exitCodes": [71], "action": "RestartFree"}]
    case, pods = all_ready(failurePolicy={"rules": rules})
    case.see(failed(A, reason=reason), *pods[1:])
    assert (is_terminal(case.status), case.status.last_failure.reason) == (terminal, reason)
    assert case.status.restarts.counted == counted


def test_a_failed_engine_alone_is_recreated() -> None:
    case, pods = all_ready(**SERVER, failurePolicy={"onGenerationFailure": "RestartGeneration", "maxRestarts": 1})
    died = failed("job-gen-1", ExitCode.RANK_FAILED, "EngineDied")
    others = [one for one in pods if one.name != "job-gen-1"]
    first = case.see(*others, died)
    assert (first.mode, first.deletions) == (Mode.RUN, ()), "it waits as every restart"
    assert first.status.phase == "Starting", "from the pass that sees it"
    assert [e.reason for e in first.events] == ["EngineRestarting"]
    assert case.see(*others, died, at=7).deletions == ()
    assert case.see(*others, died, at=12).deletions == (Deletion("Pod", "job-gen-1", "job-gen-1-0"),)
    assert {group.name: group.incarnation for group in case.status.groups} == {"a": 0, "b": 0, "gen": 1}
    assert not case.see(*others, replace(died, deletion_time=after(NOW, 300)), at=13).deletions
    back = case.see(*others, pod("job-gen-1", uid="new"), at=60)
    assert not back.deletions
    assert {m.pod: m.uid for m in case.status.members}["job-gen-1"] == "new"
    case.see(*others, pod("job-gen-1", uid="new", ready=True), at=90)
    assert case.status.phase == "Running"
    assert (case.status.attempt, case.status.restarts.total) == (0, 1)
    case.see(*others, replace(died, uid="new"), at=120)
    assert find(case.status, Condition.FAILED).reason == "EngineDied"


def _over_pods(replicas: int, policy: str = "RestartGeneration") -> tuple[Case, dict[str, ObservedPod]]:
    """Return a job with engines of two pods each, and its pods by name, all of them ready."""
    group = {"name": "gen", "replicas": replicas, "gpus": 1, "podsPerEngine": 2}
    generation = {"topology": "Server", "server": {"groups": [group]}}
    case, pods = all_ready(generation=generation, failurePolicy={"onGenerationFailure": policy, "maxRestarts": 1})
    return case, {one.name: one for one in pods}


def test_all_pods_of_an_engine_are_recreated_and_the_one_that_failed_first_is_named() -> None:
    case, pods = _over_pods(4)
    pods["job-gen-2"] = failed("job-gen-2", ExitCode.PEER_LOST, "PeerLost")
    case.see(*pods.values())
    assert case.status.last_failure is None, "what it lost may be seen later"
    pods["job-gen-3"] = failed("job-gen-3", ExitCode.RANK_FAILED, "EngineDied")
    case.see(*pods.values(), at=1)
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == ("job-gen-3", "EngineDied")
    deleted = case.see(*pods.values(), at=20).deletions
    assert {one.name for one in deleted} == {"job-gen-2", "job-gen-3"}
    assert {group.name: group.incarnation for group in case.status.groups}["gen"] == 2
    for name in ("job-gen-2", "job-gen-3"):
        pods[name] = pod(name, uid="new", ready=True)
    case.see(*pods.values(), at=60)
    assert case.status.phase == "Running"
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 1)


@pytest.mark.parametrize(("lost", "silent"), [("job-gen-2", "job-gen-3"), ("job-gen-3", "job-gen-2")])
def test_a_pod_of_an_engine_that_says_nothing_is_named_and_not_the_one_that_lost_it(lost: str, silent: str) -> None:
    group = {"name": "gen", "replicas": 4, "gpus": 1, "podsPerEngine": 2}
    policy = {"failurePolicy": {"onGenerationFailure": "RestartGeneration"}}
    case = Case(generation={"topology": "Server", "server": {"groups": [group]}}, **policy)
    pods = {name: pod(name, uid=f"{name}-0", ready=True) for name in case.topology.pods}
    pods[silent] = replace(pods[silent], node="far")
    case.see(*pods.values())
    pods[lost] = failed(lost, ExitCode.PEER_LOST, "PeerLost")
    case.see(*pods.values(), at=1)
    case.see(*pods.values(), at=45)
    assert case.status.last_failure is None, "its node may be lost"
    case.see(*pods.values(), at=47)
    found = case.status.last_failure
    assert (found.pod, found.node, found.exit_code, found.reason) == (silent, "far", None, "PeerLost")
    assert {one.pod for one in case.status.members if one.replacing} == {lost, silent}
    assert [one.name for one in case.status.failed_nodes] == ["far"]


def test_where_two_pods_of_an_engine_say_nothing_the_one_that_lost_them_is_named() -> None:
    group = {"name": "gen", "replicas": 3, "gpus": 1, "podsPerEngine": 3}
    case, pods = all_ready(generation={"topology": "Server", "server": {"groups": [group]}})
    case.see(*pods[:2], failed("job-gen-0", ExitCode.PEER_LOST, "PeerLost"), *pods[3:], at=1)
    case.see(*pods[:2], failed("job-gen-0", ExitCode.PEER_LOST, "PeerLost"), *pods[3:], at=47)
    assert case.status.last_failure.pod == "job-gen-0"


def test_a_deleted_follower_takes_its_engine_with_it() -> None:
    case, pods = _over_pods(2)
    pods["job-gen-1"] = pod("job-gen-1", uid="new")
    assert not case.see(*pods.values(), at=1).deletions
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == ("job-gen-1", "PodReplaced")
    pods["job-gen-0"] = failed("job-gen-0", ExitCode.PEER_LOST, "PeerLost")
    assert [one.name for one in case.see(*pods.values(), at=20).deletions] == ["job-gen-0"], "the other one is new"
    pods["job-gen-0"] = pod("job-gen-0", uid="newer", ready=True)
    case.see(pods.pop("job-gen-0"), pod("job-gen-1", uid="new", ready=True), *list(pods.values())[:2], at=60)
    assert (case.status.phase, case.status.restarts.total) == ("Running", 1)


def test_only_the_group_of_the_failed_engine_counts_a_recreated_pod() -> None:
    groups = [{"name": "gen", "gpus": 1}, {"name": "gen-2", "gpus": 1}]
    generation = {"topology": "Server", "server": {"groups": groups}}
    case, pods = all_ready(generation=generation, failurePolicy={"onGenerationFailure": "RestartGeneration"})
    others = [one for one in pods if one.name != "job-gen-2-0"]
    case.see(*others, failed("job-gen-2-0", ExitCode.RANK_FAILED, "EngineDied"))
    assert {group.name: group.incarnation for group in case.status.groups} == {"a": 0, "b": 0, "gen": 0, "gen-2": 1}


def test_a_first_pod_that_fails_is_named_and_not_the_one_that_lost_it() -> None:
    case, pods = _over_pods(2, "RestartAll")
    pods["job-gen-0"] = failed("job-gen-0", ExitCode.RANK_FAILED, "EngineDied")
    pods["job-gen-1"] = failed("job-gen-1", ExitCode.PEER_LOST, "PeerLost")
    case.see(*pods.values(), at=1)
    assert (case.status.last_failure.pod, case.status.last_failure.reason) == ("job-gen-0", "EngineDied")
    assert case.status.phase == "Restarting", "all pods restart"
