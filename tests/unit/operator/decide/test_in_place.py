"""Restarts in place: which failures keep the pods, when the next attempt begins in them, and what makes them be
recreated after all.
"""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.names import Condition, contract_name
from grpo_operator.api.status import Admission, Disruption
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.conditions import find, keeps_pods
from grpo_operator.decide.observe import Child, pack
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import Mode, Obstacle
from grpo_operator.layout.manifests import manifests
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from support.control_plane.jobs import NOW, ended, pod, pod_as_read
from support.control_plane.passes import SERVER, A, B, Case, all_ready

IN_PLACE = {"failurePolicy": {"restartStrategy": "InPlace", "backoffSeconds": 0}}


def holds(one: ObservedPod, code: int = ExitCode.RANK_FAILED, attempt: int = 0, at: int = 10) -> ObservedPod:
    """Return the pod after its part of an attempt has ended; its container has been started again, and holds."""
    outcome = ended(code, "PeerLost" if code == ExitCode.PEER_LOST else "RankFailed", after(NOW, at))
    return replace(one, ready=False, restarts=1, endings=(Ending(outcome, attempt),))


def after_a_failure(**more: object) -> tuple[Case, list[ObservedPod]]:
    """Return a job of which all pods ran and then failed, and the pods, which hold."""
    case, running = all_ready(**IN_PLACE, **more)
    held = [holds(one) if one.name in (A, B) else one for one in running]
    case.see(*held, at=10)
    return case, held


def begins_in_place(case: Case, held: list[ObservedPod], at: int = 11) -> list[ObservedPod]:
    """Plan the pass that begins the next attempt; return the pods as the following passes see them."""
    case.see(*held, at=at)
    told = [replace(one, announced_attempt=case.status.attempt) for one in held]
    return [one.without(case.status.over) for one in told]


def test_the_next_attempt_begins_in_the_same_pods() -> None:
    case, held = after_a_failure()
    assert (case.status.phase, case.status.summary.reason) == ("Restarting", "RankFailed")
    assert "in the same pods" in case.message(Condition.RESTARTING)
    assert (case.last.mode, case.last.renewals) == (Mode.KEEP, ())

    fresh = begins_in_place(case, held)

    assert (case.status.attempt, case.status.pods_attempt, case.status.restarts.counted) == (1, 0, 1)
    assert (case.last.mode, case.last.deletions) == (Mode.RUN, ())
    assert case.last.renewals == ((A, f"{A}-0"), (B, f"{B}-0"))
    assert [one.restarts for one in fresh] == [0, 0], "those of the attempt before explain them"
    assert case.see(*fresh, at=12).renewals == (), "both are told"
    assert case.status.last_failure is not None
    assert case.status.phase == "Starting", "how the attempt before ended is no outcome of this one"
    case.see(*(replace(one, ready=True) for one in fresh), at=13)
    assert (case.status.phase, case.status.restarts.total) == ("Running", 1), "no outcome was lost"


def test_its_children_are_those_of_the_first_attempt_but_for_the_contract() -> None:
    case, _ = after_a_failure()
    first = manifests(case.job, case.topology, 0)
    later = manifests(case.job, case.topology, 1, created_for=0)
    changed = [one for one, other in zip(later, first, strict=True) if one != other]
    assert [(one["kind"], one["metadata"]["name"]) for one in changed] == [("ConfigMap", contract_name("job", 0))]
    assert '"attempt": 1' in changed[0]["data"]["contract.json"]
    assert "immutable" not in changed[0]


def test_a_failure_in_kept_pods_is_found_among_what_ended_there_before() -> None:
    case, held = after_a_failure()
    fresh = [replace(one, ready=True) for one in begins_in_place(case, held)]
    case.see(*fresh, at=20)
    before = held[0].endings
    out_of_memory = Ending(ended(137, "OOMKilled", after(NOW, 30)))
    raw = replace(held[0], announced_attempt=1, restarts=1, endings=(*before, out_of_memory))
    case.see(raw.without(case.status.over), fresh[1], at=31)
    assert (case.status.last_failure.reason, case.status.last_failure.attempt) == ("OOMKilled", 1)


def test_engines_run_on_until_the_next_attempt_begins() -> None:
    case, held = after_a_failure(**SERVER)
    assert keeps_pods(case.status)
    begins_in_place(case, held)
    assert case.status.attempt == 1
    assert [name for name, _ in case.last.renewals] == [A, B, "job-gen-0", "job-gen-1"]


def test_it_waits_for_all_ranks_and_for_the_reason_of_each_container() -> None:
    case, (first, second) = all_ready(**IN_PLACE)
    case.see(holds(first), second, at=10)
    assert keeps_pods(case.status)
    case.see(holds(first), second, at=11)
    assert case.status.attempt == 0, "the ranks of one pod still run"
    killed = replace(second, ready=False, restarts=1, endings=(Ending(ended(137, "OOMKilled", after(NOW, 11))),))
    case.see(holds(first), killed, at=12)
    assert case.status.attempt == 0, "its launcher will say which attempt that was"
    case.see(holds(first), holds(second, at=13), at=14)
    assert case.status.attempt == 1


def test_it_waits_for_the_back_off() -> None:
    case = Case(failurePolicy={"restartStrategy": "InPlace", "backoffSeconds": 100})
    held = [holds(one) for one in case.see_all_ready()]
    case.see(*held, at=10)
    assert case.see(*held, at=60).status.attempt == 0
    assert case.see(*held, at=140).status.attempt == 1


@pytest.mark.parametrize(
    ("loss", "nodes", "why"),
    [
        ({"deletion_time": after(NOW, 300)}, {}, f"pod {B} is"),
        ({"disruption": Disruption(reason="Evicted", message="drain")}, {}, f"pod {B} is"),
        ({"uid": "another"}, {}, f"pod {B} is"),
        ({}, {"node": after(NOW, 5)}, f"pod {A} is on node node, which is not ready"),
    ],
)
def test_pods_are_recreated_if_one_of_them_is_lost(loss: dict[str, object], nodes: dict[str, Any], why: str) -> None:
    case, held = after_a_failure()
    case.see(held[0], replace(held[1], **loss), at=11, lost_nodes=nodes)
    assert (case.last.mode, case.status.attempt) == (Mode.STOPPED, 0)
    assert f"cannot begin in the same pods: {why}" in case.message(Condition.RESTARTING)
    case.see(at=12)
    assert (case.status.attempt, case.status.pods_attempt) == (1, None)


def test_pods_are_recreated_if_one_does_not_end() -> None:
    case, (first, second) = all_ready(**IN_PLACE)
    case.see(holds(first), second, at=10)
    case.see(holds(first), second, at=300)
    assert case.last.mode == Mode.KEEP
    case.see(holds(first), second, at=320)
    assert case.last.mode == Mode.STOPPED


def test_an_attempt_that_did_not_come_to_run_in_kept_pods_is_followed_by_one_in_new_pods() -> None:
    case, held = after_a_failure()
    fresh = begins_in_place(case, held)
    case.see(*(holds(one, attempt=1, at=30) for one in fresh), at=30)
    assert find(case.status, Condition.RESTARTING).reason == Reason.RESTARTING
    assert case.last.mode == Mode.STOPPED
    assert case.last.deletions == (), "they end with their StatefulSets"
    late = [pod(A, uid="late", attempt=0), pod(B, uid="late too", attempt=0)]
    assert case.see(*late, at=31).renewals == (), "a pod that comes now is told of no attempt"


def test_nodes_are_given_back_if_the_next_attempt_cannot_begin() -> None:
    case, held = after_a_failure()
    case.see(*held, at=11, obstacle=Obstacle(Reason.CLAIM_NOT_FOUND, "claim data does not exist"))
    assert case.last.mode == Mode.STOPPED
    assert case.status.summary.message == "claim data does not exist"


def test_pods_are_recreated_if_kueue_has_admitted_the_job_anew() -> None:
    case, held = after_a_failure()
    case.job = replace(case.job, admission=Admission(workload="w", uid="u", cluster_queue="q"))
    case.see(*held, at=11)
    assert case.last.mode == Mode.STOPPED
    assert "Kueue" in case.message(Condition.RESTARTING)


def test_a_job_that_is_suspended_meanwhile_ends_its_pods() -> None:
    case, held = after_a_failure()
    case.edit(**IN_PLACE, suspend=True)
    case.see(*held, at=11)
    assert (case.status.phase, case.last.mode, case.last.renewals) == ("Suspended", Mode.ENGINES_ONLY, ())
    case.see(at=12)
    case.edit(**IN_PLACE)
    case.see(at=13)
    assert (case.status.attempt, case.status.pods_attempt) == (1, None)


def test_pods_are_recreated_if_no_rank_has_failed() -> None:
    """Ranks lost each other: a node or the network is to blame, and may not be well."""
    case = Case(**IN_PLACE)
    lost = [holds(one, ExitCode.PEER_LOST) for one in case.see_all_ready()]
    for at in (15, 60):
        case.see(*lost, at=at)
    assert case.status.last_failure.reason == "PeerLost"
    assert case.last.mode == Mode.STOPPED


def test_pods_leave_a_node_on_which_three_attempts_failed() -> None:
    """The second attempt could begin nowhere else."""
    case, held = after_a_failure()
    for attempt in (1, 2):
        assert keeps_pods(case.status)
        at = 20 * attempt
        fresh = [replace(one, ready=True) for one in begins_in_place(case, held, at=at)]
        case.see(*fresh, at=at + 1)
        held = [holds(one, attempt=attempt, at=at + 5) for one in fresh]
        case.see(*held, at=at + 5)
    assert find(case.status, Condition.RESTARTING).reason == "Restarting"
    where = "on other nodes than node if possible, where pods have failed 3 times"
    assert where in case.message(Condition.RESTARTING)


def test_a_contract_that_cannot_change_means_new_pods() -> None:
    case, running = all_ready(**IN_PLACE)
    packed = pack({"metadata": {}, "immutable": True})
    fixed = Child(kind="ConfigMap", name=contract_name("job", 0), uid="c", packed=packed)
    assert case.see(*map(holds, running), at=10, children=(fixed,)).mode == Mode.STOPPED


def test_the_default_recreates_all_pods() -> None:
    case = Case(failurePolicy={"backoffSeconds": 0})
    case.see(*map(holds, case.see_all_ready()), at=10)
    assert case.last.mode == Mode.STOPPED
    assert manifests(case.job, case.topology, 0)[2]["immutable"] is True


def test_the_newest_end_of_a_container_is_read_beside_the_one_before() -> None:
    def terminated(attempt: int, message: str) -> dict[str, object]:
        said = Outcome(attempt=attempt, exit_code=ExitCode.RANK_FAILED, reason="RankFailed", message=message)
        return {"terminated": {"exitCode": 70, "finishedAt": rfc3339(NOW), "message": said.to_message()}}

    said = {"labels": {"training.grpo.dev/attempt": "2"}, "annotations": {"training.grpo.dev/attempt": "3"}}
    states = {"lastState": terminated(2, "earlier"), "state": terminated(3, "now")}
    read = pod_as_read(A, {"restartCount": 1, **states}, metadata=said)
    assert (read.attempt, read.announced_attempt) == (2, 3)
    assert read.outcome.message == "earlier"
    assert read.without(range(2, 3)).outcome.message == "now"


def test_a_pod_of_a_job_without_restart_in_place_may_say_any_attempt() -> None:
    """A user's image may report a wrong number: its end counts nevertheless."""
    case, running = all_ready(failurePolicy={"backoffSeconds": 0, "maxRestarts": 0})
    case.see(*(holds(one, attempt=-7).without(case.status.over) for one in running), at=10)
    assert case.status.phase == "Failed"
    assert pod(A).announced_attempt is None
