"""An attempt that is placed in part gives its GPUs back, and two jobs that hold each other's GPUs come apart."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_operator.api.names import Condition
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide.conditions import find, holds, is_terminal
from grpo_operator.decide.failure_policy import placement_seconds
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.plan import Mode
from grpo_spec.reports import ExitCode
from support.control_plane.jobs import NOW, pod
from support.control_plane.passes import SERVER, A, B, Case, all_ready, failed

NO_ROOM = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
FIVE = {"trainer": {"groups": [{"name": "a", "replicas": 5, "gpus": 1}]}}


def homeless(name: str, attempt: int = 0) -> ObservedPod:
    """Return a pod that the scheduler finds no node for."""
    return pod(name, uid=f"{name}-{attempt}", attempt=attempt, node=None, ip=None, unschedulable=NO_ROOM)


def in_part(case: Case, placed: int) -> list[ObservedPod]:
    """Return the pods of the current attempt, of which the first ones have a node."""
    number = case.status.attempt or 0
    return [
        pod(name, uid=f"{name}-{number}", attempt=number) if index < placed else homeless(name, number)
        for index, name in enumerate(case.topology.pods)
    ]


def ends(case: Case) -> int:
    """Return how long the current attempt may be placed in part, in seconds."""
    spec = case.job.spec
    limit = spec.scheduling.timeout_seconds or spec.rendezvous.timeout_seconds
    return placement_seconds(limit, case.job.uid, case.status.attempt or 0)


def test_what_it_holds_is_named_and_given_back_and_the_restart_does_not_count() -> None:
    case = Case(failurePolicy={"maxRestarts": 0, "onTrainerFailure": "Fail"})
    limit = ends(case)
    assert 480 <= limit <= 600, "the default is rendezvous.timeoutSeconds, less the jitter"
    waiting = case.see(*in_part(case, 1), at=5)
    until = rfc3339(after(NOW, 5 + limit))
    assert case.message(Condition.SCHEDULED) == (
        f"pod {B}: {NO_ROOM}; 1 of 2 pods have a node, the last since 2026-01-01T00:00:05Z; they give their GPUs back "
        f"at {until} unless another pod finds a node (scheduling.timeoutSeconds)"
    )
    assert (waiting.mode, waiting.status.phase, waiting.status.summary.reason) == (Mode.RUN, "Pending", "Unschedulable")
    assert case.see(*in_part(case, 1), at=4 + limit).mode == Mode.RUN
    over = case.see(*in_part(case, 1), at=5 + limit)
    assert (over.mode, over.status.phase) == (Mode.STOPPED, "Restarting")
    assert over.status.summary.reason == "PlacementTimeout"
    assert (over.status.restarts.total, over.status.restarts.counted) == (1, 0)
    assert case.message(Condition.RESTARTING).startswith(
        "1 of 2 pods had a node, and since 2026-01-01T00:00:05Z no other pod has found one: "
        f"pod {B}: {NO_ROOM}; their GPUs are given back (scheduling.timeoutSeconds); the job runs once all 2 pods fit "
        "at the same time: free GPUs, add nodes or ask for fewer; this restart does not count towards "
        f"failurePolicy.maxRestarts; next attempt not before {rfc3339(over.status.next_restart_time)}"
    )
    assert [(event.type, event.reason) for event in over.events] == [("Warning", "Restarting")]
    assert not holds(case.status, Condition.SCHEDULED)
    assert case.status.placement is None
    assert case.see(at=2000).status.attempt == 1
    case.see_all_ready(at=2010)
    assert (case.status.phase, case.status.placement_timeouts) == ("Running", None)


GROUPS = [{"name": "seven", "gpus": 7}, {"name": "eight", "replicas": 2, "gpus": 8}, {"name": "four", "gpus": 4}]
UNEQUAL = {"trainer": {"groups": GROUPS}}
SEVEN, EIGHT_0, EIGHT_1, FOUR = "job-seven-0", "job-eight-0", "job-eight-1", "job-four-0"


def unplaced(name: str) -> ObservedPod:
    """Return a pod that the scheduler has not looked at yet."""
    return pod(name, node=None, ip=None)


def test_pods_with_more_gpus_find_their_nodes_before_others_exist() -> None:
    case = Case(**UNEQUAL)
    assert case.see().limits == {"job-seven": 0, "job-four": 0}
    assert "job-eight-0 is missing" in case.message(Condition.SCHEDULED)
    assert case.see(unplaced(EIGHT_0), unplaced(EIGHT_1)).limits == {"job-seven": 0, "job-four": 0}
    assert case.message(Condition.SCHEDULED) == "2 pods wait for the scheduler; the first is job-eight-0"
    assert case.see(pod(EIGHT_0), unplaced(EIGHT_1)).limits == {"job-seven": 0, "job-four": 0}
    assert case.see(pod(EIGHT_0), pod(EIGHT_1)).limits == {"job-four": 0}
    assert case.see(pod(SEVEN), pod(EIGHT_0), pod(EIGHT_1)).limits == {}
    assert "job-four-0 is missing" in case.message(Condition.SCHEDULED)


def test_smaller_groups_do_not_wait_where_a_larger_one_has_no_room() -> None:
    """An autoscaler must see all pods to add nodes for all at once."""
    case = Case(**UNEQUAL)
    assert case.see(pod(EIGHT_0), homeless(EIGHT_1)).limits == {"job-four": 0}
    assert case.see(pod(EIGHT_0), homeless(EIGHT_1), homeless(SEVEN)).limits == {}


def test_groups_of_a_running_attempt_are_not_held_back() -> None:
    case = Case(**UNEQUAL)
    case.see_all_ready(at=10)
    assert case.see(pod(SEVEN), pod(EIGHT_0), pod(FOUR), at=11).limits == {}


TRAINER, ENGINE, MORE = "job-a-0", "job-gen-0", "job-gen-1"


def with_engines(*others: str, **scheduling: str) -> Case:
    """Return a job of one trainer pod, three elastic engines and one engine for each other group."""
    groups = [{"name": "gen", "gpus": 1}, *({"name": name, "gpus": 1} for name in others)]
    server = {"groups": groups, "elastic": {"replicas": 3, "maxReplicas": 3}}
    return Case(
        trainer={"groups": [{"name": "a", "gpus": 1}]},
        generation={"topology": "Server", "server": server},
        failurePolicy={"onGenerationFailure": "RestartGeneration"},
        scheduling=scheduling,
    )


def placed(name: str) -> ObservedPod:
    """Return the pod of `homeless` with a node."""
    return pod(name, uid=f"{name}-0")


def test_engines_that_the_job_does_not_need_take_no_node_before_it_has_its_own() -> None:
    case = with_engines()
    assert case.see().limits == {"job-gen": 1}
    assert case.see(homeless(TRAINER), placed(ENGINE)).limits == {"job-gen": 1}
    old = pod(MORE, attempt=7)
    assert case.see(homeless(TRAINER), placed(ENGINE), old).limits == {"job-gen": 1}, "an old pod is none of its own"
    assert case.see(placed(TRAINER), placed(ENGINE)).limits == {}
    # Engines that exist are not deleted again while another pod is replaced.
    assert case.see(placed(TRAINER), homeless(ENGINE), homeless(MORE)).limits == {}
    case.see_all_ready()
    assert case.see(placed(TRAINER), homeless(ENGINE)).limits == {}, "it has run"
    assert case.status.attempt == 0
    beside = with_engines("stay")
    assert beside.see(homeless(TRAINER), placed("job-stay-0")).limits == {"job-gen": 0}
    assert beside.see(placed(TRAINER), placed("job-stay-0")).limits == {}


def test_elastic_engines_wait_until_the_gang_has_its_nodes() -> None:
    """A job that waits holds no GPU, and its own engines must not take the gang's nodes."""
    case = with_engines(gang="Native")
    assert case.see(homeless(TRAINER)).limits == {"job-gen": 0}
    assert NO_ROOM in case.message(Condition.SCHEDULED)
    assert case.see(placed(TRAINER)).limits == {"job-gen": 1}
    assert "job-gen-0 is missing" in case.message(Condition.SCHEDULED)
    assert case.see(placed(TRAINER), homeless(ENGINE)).limits == {"job-gen": 1}
    assert case.see(placed(TRAINER), placed(ENGINE)).limits == {}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 479), st.integers(0, 5)), min_size=1, max_size=5), st.integers(600, 9000))
def test_the_clock_restarts_with_each_pod_that_finds_a_node_and_with_nothing_else(
    gains: list[tuple[int, int]], last: int
) -> None:
    """`gains`: the seconds until one more pod finds a node, and how many pods without a node exist by then."""
    case = Case(**FIVE)
    at = exist = 0
    for placed, (gap, more) in enumerate(gains):
        at += gap
        exist = max(exist, placed + more)
        assert case.see(*in_part(case, placed)[:exist], at=at).mode == Mode.RUN
    ended = case.see(*in_part(case, len(gains) - 1), at=at + last).mode == Mode.STOPPED
    assert ended == (len(gains) > 1), "an attempt without any node holds nothing"


def test_engines_count_and_a_pod_that_is_missing_is_no_better_than_one_without_a_node() -> None:
    case = Case(**SERVER)
    pods = [pod(name, uid=name) for name in case.topology.pods]
    case.see(*pods[:-1], at=1)
    assert "3 of 4 pods exist; job-gen-1 is missing" in case.message(Condition.SCHEDULED)
    case.see(*pods[:-1], at=1 + ends(case))
    assert case.status.last_failure.reason == "PlacementTimeout"
    assert "3 of 4 pods had a node, and since 2026-01-01T00:00:01Z no other" in case.message(Condition.RESTARTING)


def test_an_attempt_that_has_run_keeps_its_gpus() -> None:
    case, pods = all_ready(**SERVER, failurePolicy={"onGenerationFailure": "RestartGeneration"})
    engine = failed("job-gen-1", reason="EngineDied")
    case.see(*[engine if one.name == engine.name else one for one in pods], at=5)
    others = [one for one in pods if one.name != engine.name]
    replaced = replace(homeless(engine.name), uid="new")
    case.see(*others, replaced, at=10)
    assert case.see(*others, replaced, at=50_000).mode == Mode.RUN
    assert "they give their GPUs back" not in case.message(Condition.SCHEDULED)


def test_the_time_before_an_engine_was_replaced_does_not_count() -> None:
    case = Case(**SERVER, failurePolicy={"onGenerationFailure": "RestartGeneration"})
    pods = [pod(name, uid=f"{name}-0") for name in case.topology.pods]
    case.see(*pods)
    engine = failed("job-gen-1", reason="EngineDied")
    case.see(*[engine if one.name == engine.name else one for one in pods], at=1000)
    others = [one for one in pods if one.name != engine.name]
    assert case.see(*others, at=1002).mode == Mode.RUN
    assert case.see(*others, at=1002 + ends(case)).mode == Mode.STOPPED


def test_waits_double_and_end_with_the_startup_deadline_of_the_first_attempt() -> None:
    case = Case(
        startupDeadlineSeconds=5000,
        scheduling={"timeoutSeconds": 100},
        failurePolicy={"backoffSeconds": 100, "maxBackoffSeconds": 3000},
    )
    waits, at = [], 0
    while not is_terminal(case.status):
        assert at <= 5100
        case.see(*in_part(case, 1), at=at)
        case.see(*in_part(case, 1), at=at + 100)
        assert not is_terminal(case.status)
        waits.append(round(seconds_between(after(NOW, at + 100), case.status.next_restart_time)))
        at += 100 + waits[-1]
        case.see(at=min(at, 5000))
    for wait, expected in zip(waits, (100, 200, 400, 800, 1600, 3000), strict=False):
        assert expected * 0.8 <= wait <= expected * 1.2
    assert find(case.status, Condition.FAILED).reason == "StartupDeadlineExceeded"
    assert at > 5000, "it ended between two attempts"
    number = len(waits)
    assert case.message(Condition.FAILED).startswith(
        f"attempt {number - 1} is not running after 5000 s (spec.startupDeadlineSeconds), and {number} attempts found "
        "nodes for only some of the pods; 1 of 2 pods had a node"
    )


def test_attempts_in_a_row_are_counted_until_one_runs_or_the_job_is_suspended() -> None:
    spec = {"failurePolicy": {"backoffSeconds": 0}}
    case = Case(**spec)

    def time_out(at: int) -> str:
        case.see(*in_part(case, 1), at=at)
        case.see(*in_part(case, 1), at=at + 600)
        message = case.message(Condition.RESTARTING)
        case.see(at=at + 601)
        return message

    assert "in a row" not in time_out(1)
    assert "; 2 in a row since 2026-01-01T00:00:00Z; next attempt" in time_out(1000)
    case.see_all_ready(at=2000)
    case.see(failed(A, ExitCode.RANK_FAILED, at=2001, attempt=2), at=2001)
    case.see(at=2002)
    assert "in a row" not in time_out(3000)
    case.edit(**spec, suspend=True)
    case.see(at=4000)
    case.edit(**spec)
    case.see(at=90_000)
    assert "in a row" not in time_out(90_001), "the time of the suspension counts neither"
    assert not is_terminal(case.status)


@pytest.mark.parametrize("all_placed", [False, True])
def test_pods_that_give_up_on_one_without_a_node_did_not_fail(*, all_placed: bool) -> None:
    case = Case()
    gave_up = failed(A, ExitCode.PEER_LOST, "PeersMissing", at=300)
    case.see(gave_up, pod(B, uid=f"{B}-0") if all_placed else homeless(B), at=300)
    if all_placed:
        case.see(gave_up, pod(B, uid=f"{B}-0"), at=360)
    assert case.status.last_failure.reason == ("PeersMissing" if all_placed else "PlacementTimeout")
    assert case.status.restarts.counted == all_placed


@pytest.mark.parametrize(("action", "phase", "counted"), [("Fail", "Failed", 0), ("Restart", "Restarting", 1)])
def test_a_rule_about_it_decides(action: str, phase: str, counted: int) -> None:
    case = Case(failurePolicy={"rules": [{"name": "mine", "reasons": ["PlacementTimeout"], "action": action}]})
    case.see(*in_part(case, 1))
    case.see(*in_part(case, 1), at=600)
    assert (case.status.phase, case.status.restarts.counted) == (phase, counted)


@dataclass
class Tenant:
    """One of two jobs that share a cluster; `born` says when a pod was created, or when it was deleted."""

    case: Case
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    ends_at: int | None = None


STEP = 10


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(5, 8), st.integers(0, 40))
def test_two_jobs_that_hold_each_others_gpus_come_apart(seed: int, room: int, grace: int) -> None:
    """Each job needs all nodes but three. The scheduler takes their pods in any order; pods take `grace` s to end."""
    chance, size = random.Random(seed), room - 2
    groups = [{"name": "a", "replicas": size, "gpus": 1}]
    tenants = [Tenant(Case(trainer={"groups": groups}, training={"promptsPerStep": 64})) for _ in range(2)]
    for tenant in tenants:
        tenant.case.job = replace(tenant.case.job, uid=f"uid-{chance.random()}")
    ends_of_life: dict[tuple[int, str], int] = {}
    now = 0
    while not all(is_terminal(tenant.case.status) for tenant in tenants):
        now += STEP
        assert now < 2 * 3600, "they come apart"
        queue = []
        for number, tenant in enumerate(tenants):
            case = tenant.case
            case.see(*tenant.pods.values(), at=now)
            attempt = case.status.attempt or 0
            if case.last.mode == Mode.RUN:
                tenant.pods = {n: tenant.pods.get(n, homeless(n, attempt)) for n in case.topology.pods}
                queue += [(number, name) for name, one in tenant.pods.items() if one.node is None]
            for name in list(tenant.pods) if case.last.mode == Mode.STOPPED else ():
                if ends_of_life.setdefault((number, name), now + grace) <= now:
                    del tenant.pods[name], ends_of_life[number, name]
        chance.shuffle(queue)
        for number, name in queue[: room - sum(one.node is not None for t in tenants for one in t.pods.values())]:
            tenants[number].pods[name] = replace(tenants[number].pods[name], node="node", unschedulable=None)
        for tenant in tenants:
            if tenant.pods and all(one.node for one in tenant.pods.values()) and tenant.case.last.mode == Mode.RUN:
                tenant.ends_at = tenant.ends_at or now + 300
                done = now >= tenant.ends_at
                tenant.pods = {
                    name: failed(name, ExitCode.DONE, "Done", at=now, attempt=one.attempt)
                    if done
                    else replace(one, ready=True)
                    for name, one in tenant.pods.items()
                }
    assert [tenant.case.status.phase for tenant in tenants] == ["Succeeded", "Succeeded"]
