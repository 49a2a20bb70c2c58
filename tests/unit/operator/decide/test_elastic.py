"""Engines join and leave a running job: nothing restarts, nothing waits for them, and all of it is said."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.progress_status import ProgressStatus
from grpo_operator.api.status import Disruption
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide.plan import Mode
from grpo_operator.layout.contracts import make_contract
from grpo_spec.reports import ExitCode, Progress
from support.control_plane.jobs import NOW, pod, world
from support.control_plane.passes import Case, all_ready, dead, engine, failed, trainers

NO_ROOM = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."


def elastic(replicas: int, **more: Any) -> dict[str, Any]:
    """Return a spec with so many engines, job-gen-0, ...; one at least, four at most."""
    server = {"groups": [{"name": "gen", "gpus": 1}], "elastic": {"replicas": replicas, "maxReplicas": 4}}
    policy = {"onGenerationFailure": "RestartGeneration", "maxRestarts": 0, "hangSeconds": 60}
    return {"generation": {"topology": "Server", "server": server}, "failurePolicy": policy} | more


@pytest.fixture
def case() -> Case:
    """A job that runs with two engines."""
    case, _ = all_ready(**elastic(2))
    assert case.status.phase == "Running"
    return case


def test_the_contract_is_the_same_however_many_engines_there_are() -> None:
    contracts = [make_contract(*world(**elastic(replicas)), attempt=0) for replicas in (1, 2, 4)]
    assert contracts[0] == contracts[1] == contracts[2]
    assert [(one.name, one.elastic) for one in contracts[0].engines] == [
        ("job-gen-0", False),
        ("job-gen-1", True),
        ("job-gen-2", True),
        ("job-gen-3", True),
    ]


def test_beside_engines_of_another_group_the_job_needs_none_of_the_elastic_ones() -> None:
    spec = elastic(2)
    spec["generation"]["server"]["groups"].append({"name": "stay", "gpus": 1})
    case = Case(**spec)
    assert [(one.name, one.elastic) for one in case.topology.engines] == [
        *((f"job-gen-{ordinal}", True) for ordinal in range(4)),
        ("job-stay-0", False),
    ]
    stays = pod("job-stay-0", uid="job-stay-0-0", group="stay", ready=True)
    case.see(*trainers(case), stays, engine(0, ready=True), engine(1, ready=True))
    assert case.message(Condition.RUNNING) == "all 3 pods are ready, and 2 of 2 elastic ones"
    taken = Disruption(reason="Preempted", message="for a pod of higher priority")
    case.see(*trainers(case), stays, engine(0, disruption=taken, deletion_time=NOW), engine(1, ready=True), at=10)
    waits = engine(0, node=None, ip=None, unschedulable=NO_ROOM, uid="another")
    case.see(*trainers(case), stays, waits, engine(1, ready=True), at=12)
    assert (case.status.phase, case.status.attempt, case.status.restarts.counted) == ("Running", 0, 0)
    assert case.message(Condition.RUNNING).endswith(f"1 of 2 elastic ones; job-gen-0 has no node: {NO_ROOM}")
    case.see(*trainers(case), stays, waits, engine(1, ready=True), at=100_000)
    assert (case.status.phase, case.status.placement) == ("Running", None), "no deadline waits for an elastic engine"


def test_the_job_begins_without_the_elastic_engines() -> None:
    case = Case(**elastic(3))
    two = engine(2, node=None, ip=None, unschedulable=NO_ROOM)
    case.see(*trainers(case), engine(0, ready=True), engine(1), two)
    assert (case.status.phase, case.status.placement) == ("Running", None)
    assert case.message(Condition.RUNNING) == (
        "all 3 pods are ready, and 0 of 2 elastic ones; job-gen-1 on node node: its engine loads"
    )
    case.see(*trainers(case), engine(0, ready=True), engine(1, ready=True), two)
    assert case.message(Condition.RUNNING).endswith(f"1 of 2 elastic ones; job-gen-2 has no node: {NO_ROOM}")
    assert (case.status.summary.generation, case.status.elastic and case.status.elastic.replicas) == ("2/3", 3)


def test_engines_that_are_added_disturb_nothing(case: Case) -> None:
    before = [*trainers(case), engine(0, ready=True), engine(1, ready=True)]
    case.edit(**elastic(4))
    plan = case.see(*before, at=10)
    assert (plan.mode, case.status.phase, case.status.attempt) == (Mode.RUN, "Running", 0)
    assert case.message(Condition.RUNNING).endswith("and 1 of 3 elastic ones; job-gen-2 does not exist yet")
    case.see(*before, engine(2, ready=True), engine(3, ready=True), at=20)
    assert case.message(Condition.RUNNING) == "all 3 pods are ready, and 3 of 3 elastic ones"
    assert case.status.elastic.selector == "training.grpo.dev/job-uid=uid,training.grpo.dev/group=gen"


def test_engines_that_are_removed_have_not_failed(case: Case) -> None:
    case.edit(**elastic(1))
    leaving = engine(1, deletion_time=after(NOW, 310))
    case.see(*trainers(case), engine(0, ready=True), leaving, at=10)
    case.see(*trainers(case), engine(0, ready=True), replace(failed("job-gen-1", ExitCode.STOPPED), group="gen"), at=20)
    plan = case.see(*trainers(case), engine(0, ready=True), at=30)
    assert (plan.mode, case.status.phase, case.status.restarts.total) == (Mode.RUN, "Running", 0)
    assert case.status.last_failure is None
    assert case.message(Condition.RUNNING) == "all 3 pods are ready"


def test_an_engine_that_is_added_again_while_its_pod_still_ends_has_not_failed(case: Case) -> None:
    rest = [*trainers(case), engine(0, ready=True)]
    case.edit(**elastic(1))
    case.see(*rest, engine(1, deletion_time=after(NOW, 310)), at=10)
    case.edit(**elastic(2))
    for at in (11, 12):
        case.see(*rest, engine(1, deletion_time=after(NOW, 310)), at=at)
    case.see(*rest, engine(1, ready=True, uid="another"), at=20)
    assert (case.status.phase, case.status.restarts.total, case.status.last_failure) == ("Running", 0, None)
    assert case.message(Condition.RUNNING) == "all 3 pods are ready, and 1 of 1 elastic ones"


def test_spare_engines_that_fail_at_once_are_each_replaced() -> None:
    case, _ = all_ready(**elastic(4))
    case.see(*trainers(case), engine(0, ready=True), *(dead(number, at=5) for number in (1, 2, 3)), at=5)
    replaced = [one for one in case.status.members if one.replacing]
    assert [(one.pod, one.failures, one.outcome and one.outcome.reason) for one in replaced] == [
        (f"job-gen-{number}", 1, "EngineDied") for number in (1, 2, 3)
    ]
    assert all(one.replace_time and one.replace_time > after(NOW, 5) for one in replaced)
    assert [group.incarnation for group in case.status.groups if group.name == "gen"] == [3]


def test_an_elastic_engine_that_fails_again_and_again_is_replaced_ever_later_and_costs_the_job_nothing(
    case: Case,
) -> None:
    """`case` has maxRestarts 0: the first failure of a pod that the job needs would end it."""
    rest, at, waits = [*trainers(case), engine(0, ready=True)], 5, []
    for number in range(8):
        died = dead(1, at=at, uid=f"gen-1-{number}" if number else "job-gen-1-0")
        plan = case.see(*rest, died, at=at)
        assert plan.deletions == (), "it waits"
        assert [(one.type, one.reason) for one in plan.events] == [("Warning", "EngineRestarting")]
        assert "the job does not need it" in plan.events[0].message
        assert ("on other nodes than node if possible" in plan.events[0].message) == (number > 0)
        due = next(one.replace_time for one in case.status.members if one.pod == "job-gen-1")
        said = f"job-gen-1 on node node: EngineDied: said EngineDied; it is replaced at {rfc3339(due)}"
        assert said in case.message(Condition.RUNNING)
        waits.append(seconds_between(after(NOW, at), due))
        assert case.last.requeue_after <= waits[-1]
        at += round(waits[-1])
        assert [one.name for one in case.see(*rest, died, at=at).deletions] == ["job-gen-1"]
        case.see(*rest, replace(died, uid=f"gen-1-{number + 1}", endings=()), at=at + 1)
        at += 2
    assert waits == pytest.approx([10, 20, 40, 80, 160, 320, 600, 600], rel=0.2)
    assert (case.status.phase, case.status.attempt, case.status.last_failure) == ("Running", 0, None)
    assert case.status.restarts.total == 0
    long_after = at + 1300
    case.see(*rest, dead(1, at=long_after, uid="gen-1-8"), at=long_after)
    due = next(one.replace_time for one in case.status.members if one.pod == "job-gen-1")
    assert seconds_between(after(NOW, long_after), due) <= 12, "it ran for longer than twice the longest wait"


@pytest.mark.parametrize("how", ["deleted by hand", "evicted", "evicted for its own limit", "its node is lost"])
def test_an_elastic_engine_that_disappears_costs_the_job_nothing(case: Case, how: str) -> None:
    rest = [*trainers(case), engine(0, ready=True)]
    gone = {"evicted": Disruption(reason="Evicted", message="a drain")}
    gone["evicted for its own limit"] = Disruption(reason="Evicted", message="emptyDir", own_fault=True)
    lost = {"lost": after(NOW, 1)} if how == "its node is lost" else {}
    for number in range(1, 6):
        there = next(one for one in case.status.members if one.pod == "job-gen-1").uid
        going = engine(1, uid=there, disruption=gone.get(how), node="lost" if lost else "node")
        case.see(*rest, going, at=100 * number, lost_nodes=lost)
        for at in (1, 2):
            case.see(*rest, engine(1, ready=True, uid=f"gen-1-{number}"), at=100 * number + at)
    assert (case.status.phase, case.status.attempt, case.status.restarts.total) == ("Running", 0, 0)
    assert case.message(Condition.RUNNING) == "all 3 pods are ready, and 1 of 1 elastic ones"


def test_a_rule_that_ends_the_job_is_not_about_engines_that_it_does_not_need(case: Case) -> None:
    rules = [{"name": "all", "role": "generation", "action": "Fail"}]
    case.edit(**elastic(4, failurePolicy={"onGenerationFailure": "RestartGeneration", "rules": rules}))
    rest = [*trainers(case), engine(0, ready=True), engine(1, ready=True), engine(2, ready=True)]
    wrong = replace(failed("job-gen-3", ExitCode.CONFIG_ERROR, "ConfigError", at=12), group="gen")
    case.see(*rest, wrong, at=12)
    assert case.status.phase == "Running"
    case.see(*trainers(case), dead(0, at=20), *rest[3:], wrong, at=20)
    assert case.status.phase == "Failed"


def test_ranks_that_hang_are_found_while_an_engine_is_missing(case: Case) -> None:
    hung = Progress(step=3, total_steps=9, age_seconds=61, rank_phases={"0": "Training"})
    case.edit(**elastic(4, failurePolicy={"hangSeconds": 60, "onGenerationFailure": "RestartGeneration"}))
    case.see(*trainers(case), engine(0, ready=True), engine(1, ready=True), engine(2), at=90, progress=hung)
    assert case.status.last_failure.reason == "Hung"


def balancing(replicas: int, metrics: dict[str, float], **scale: int) -> Case:
    """Return a job whose ranks report these metrics and which changes the number of its engines, within `scale`."""
    spec = elastic(replicas, training={"maxStaleness": 1})
    spec["generation"]["server"]["elastic"] |= scale
    case = Case(**spec)
    progress = ProgressStatus(step=8, total_steps=99, metrics=metrics, time=NOW)
    case.status = case.status.model_copy(update={"progress": progress})
    return case


@pytest.mark.parametrize(
    ("balanced", "ready", "becomes"),
    [(3.0, 2, 3), (9.0, 2, 4), (1.0, 2, None), (2.0, 2, None), (3.0, 1, None), (None, 2, None)],
)
def test_the_operator_follows_the_number_that_balances(balanced: float | None, ready: int, becomes: int | None) -> None:
    """`becomes`: the number that it writes into the spec, of 2 to 4 allowed ones."""
    case = balancing(2, {} if balanced is None else {"engines/balanced": balanced}, minReplicas=2)
    plan = case.see(*trainers(case), *(engine(number, ready=number < ready) for number in range(2)))
    assert (plan.scale and plan.scale.replicas) == becomes


@pytest.mark.parametrize(
    ("balanced", "count", "becomes"),
    [
        (2.0, 1.0, None),  # two have lost their nodes: ranks propose no more than twice the engines that sample
        (4.0, 2.0, None),  # one is left out of pushes: others would not help before it does
        (4.0, 3.0, 4),
        (2.0, 3.0, 2),
        (2.0, 2.0, 2),
    ],
)
def test_engines_that_were_asked_for_and_do_not_sample_are_waited_for(
    balanced: float, count: float, becomes: int | None
) -> None:
    """The job asks for three engines, all of which are ready."""
    metrics = {"engines/balanced": balanced, "engines/count": count}
    case = balancing(3, metrics, minReplicas=1)
    report = Progress(step=9, total_steps=99, metrics=metrics, advice="run 2 engines in place of 1")
    pods = [*trainers(case), *(engine(number, ready=True) for number in range(3))]
    case.see(*pods, progress=report)
    plan = case.see(*pods, at=20, progress=report)
    assert (plan.scale and plan.scale.replicas) == becomes
    progress = case.status.progress
    assert progress.advice == (report.advice if count == 3 else None)


def test_the_operator_takes_engines_away_and_leaves_suspended_jobs_alone() -> None:
    case = balancing(4, {"engines/balanced": 2.0}, minReplicas=1)
    pods = [*trainers(case), *(engine(number, ready=number < 3) for number in range(4))]
    scale = case.see(*pods).scale
    assert scale.message == "4 elastic engines become 2: 2 engines would balance the ranks (1 to 4 are allowed)"
    case.job = replace(case.job, spec=case.job.spec.model_copy(update={"suspend": True}))
    assert case.see(*pods, at=5).scale is None
