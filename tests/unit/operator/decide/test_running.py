"""The conditions `Scheduled` and `Running` while pods start, run, or are lost, or a spec is refused."""

from dataclasses import replace

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after
from grpo_operator.decide.conditions import find
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.plan import Obstacle
from grpo_operator.decide.second_look import News, news
from grpo_spec.reports import Progress
from support.control_plane.jobs import NOW, pod, pod_as_read
from support.control_plane.passes import A, B, Case, all_ready


def test_pods_on_the_way_to_running_need_no_write_of_their_own() -> None:
    case = Case()
    begun = case.status
    waiting = case.see().status
    starting = case.see(pod(A), pod(B)).status
    assert (begun.phase, waiting.phase, starting.phase) == ("Pending", "Pending", "Starting")
    assert news(begun, waiting) == News.DETAILS
    assert news(begun, starting) == News.DETAILS
    run = case.see(pod(A, ready=True), pod(B, ready=True))
    assert news(starting, run.status) == News.URGENT
    assert news(run.status, case.see(pod(A, ready=True), pod(B)).status) == News.URGENT


def test_that_the_scheduler_finds_no_node_is_written_at_once() -> None:
    case = Case()
    unseen = pod(B, node=None, ready=False)
    empty = case.see().status
    waiting = case.see(pod(A, node=None), unseen).status
    assert news(empty, waiting) == News.DETAILS
    refused = case.see(pod(A, node=None), replace(unseen, unschedulable="0/2 nodes are available")).status
    held = case.see(pod(A), replace(unseen, unschedulable="0/2 nodes are available")).status
    assert news(waiting, refused) == News.URGENT
    assert news(refused, held) == News.URGENT
    assert news(held, case.see(pod(A), replace(unseen, unschedulable="0/3 nodes are available")).status) == News.DETAILS
    assert news(held, case.see(pod(A), pod(B)).status) == News.URGENT


def test_that_all_pods_run_is_one_event_if_nothing_was_said_before() -> None:
    at_once, slowly = Case(), Case()
    assert [e.reason for e in slowly.see(pod(A), pod(B)).events] == ["Scheduled"]
    for case in (at_once, slowly):
        assert [e.reason for e in case.see(pod(A, ready=True), pod(B, ready=True)).events] == ["Running"]


def test_the_message_names_the_peers_that_rank_0_waits_for() -> None:
    case = Case()
    case.see(pod(A), pod(B), progress=Progress(phase="WaitingForPeers", waiting_for=("job-b-0: DNS: no such name",)))
    running = find(case.status, Condition.RUNNING)
    assert (running.status, running.reason) == ("False", "WaitingForPeers")
    assert "job-b-0: DNS" in running.message


def test_the_message_names_the_pod_whose_container_cannot_start() -> None:
    case = Case()
    case.see(pod(A), pod(B, waiting="ErrImagePull: no such image"))
    running = find(case.status, Condition.RUNNING)
    assert running.reason == "ContainerWaiting"
    assert running.message == f"pod {B} on node node: ErrImagePull: no such image"


def test_ranks_that_make_no_progress_are_shown_with_their_phase_long_before_it_is_a_hang() -> None:
    case, pods = all_ready()
    still = "no rank has taken a step, sampled a token, scored an answer or changed its phase"

    def see(idle: float, at: int, step: float | None = None) -> str:
        said = Progress(step=3, age_seconds=9e3, idle_seconds=idle, step_seconds=step, phase="Rewarding")
        phases = {"0": f"Rewarding for {idle:.0f} s", "1": f"Gathering for {idle:.0f} s", "2": "Gathering for 3 s"}
        case.see(*pods, at=at, progress=said.model_copy(update={"rank_phases": phases}))
        return case.status.summary.message

    assert see(59, at=1) == "all 2 pods are ready"
    assert see(61, at=2) == (
        f"all 2 pods are ready; for 1 min or more {still} (rank 0: Rewarding; rank 1 and 1 more: Gathering); "
        "it is a hang after 1800 s (failurePolicy.hangSeconds)"
    )
    assert see(119, at=3) == see(62, at=4), "written once"
    assert "for 4 min or more" in see(300, at=5)
    assert see(300, at=6, step=400) == "all 2 pods are ready", "a step takes longer"
    assert case.status.phase == "Running"


def _unschedulable(said: str) -> str | None:
    """Return what is read of a sentence of the scheduler."""
    condition = {"type": "PodScheduled", "status": "False", "message": said}
    return pod_as_read(A, conditions=[condition]).unschedulable


def test_a_sentence_of_the_scheduler_is_quoted_once() -> None:
    said = "0/8 nodes are available: 8 Insufficient cpu."
    more = "preemption: 0/8 nodes are available: 8 No preemption victims found."
    quoted = _unschedulable(f"{said} {more} {said}\n{said} {more}")
    assert quoted == f"{said} {more}"
    case = Case()
    pods = [pod(name, node=None, unschedulable=quoted) for name in (A, B)]
    events = case.see(*pods).events + case.see(*pods, at=1).events
    assert case.message(Condition.SCHEDULED) == f"pod {A}: {said} {more}"
    assert [(one.type, one.reason) for one in events] == [("Warning", "Unschedulable")]


NOT_HELPFUL = "8 Preemption is not helpful for scheduling"


@pytest.mark.parametrize(
    ("why", "nobody", "is_never"),
    [
        ("8 Insufficient nvidia.com/gpu", NOT_HELPFUL, True),
        ("8 Insufficient nvidia.com/gpu", "8 No preemption victims found for incoming pod", False),
        ("7 node(s) had untolerated taint {a.b/c: }, 1 Insufficient cpu", NOT_HELPFUL, True),
        ("8 node(s) didn't match Pod's node affinity/selector", NOT_HELPFUL, False),
        (
            "4 Insufficient cpu, 4 node(s) had untolerated taint",
            "4 No preemption victims found for incoming pod, 4 Preemption is not helpful for scheduling",
            False,
        ),
    ],
)
def test_a_pod_that_no_empty_node_has_room_for_is_told_from_one_that_waits(
    why: str, nobody: str, is_never: bool
) -> None:
    said = f"0/8 nodes are available: {why}. preemption: 0/8 nodes are available: {nobody}."
    never = " Each node that it may use is too small, even when it is empty"
    assert _unschedulable(said) == said + (never if is_never else "")


def test_the_message_names_pods_that_are_no_longer_ready() -> None:
    case, pods = all_ready()
    case.see(pods[0], replace(pods[1], ready=False), at=5)
    assert case.message(Condition.RUNNING) == f"1 of 2 pods are ready; no longer ready: {B}"


def test_pods_of_another_attempt_do_not_count() -> None:
    case = Case()
    others = [replace(one, attempt=7) for one in case.see_all_ready()]
    case.see(*others, at=5)
    assert case.message(Condition.SCHEDULED).startswith(f"0 of 2 pods exist; {A} is missing")
    assert {group.ready for group in case.status.groups} == {0}


def test_a_node_that_no_longer_exists_is_reported_once() -> None:
    case, pods = all_ready()
    silent = replace(pods[1], ready=False)
    first = case.see(pods[0], silent, at=60, lost_nodes={"node": after(NOW, 60)}, absent_nodes=frozenset({"node"}))
    assert f"node node no longer exists; its pods: {B}" in case.message(Condition.RUNNING)
    later = case.see(pods[0], silent, at=62, lost_nodes={"node": after(NOW, 62)}, absent_nodes=frozenset({"node"}))
    assert later.status == first.status


def test_a_refusal_is_reported_once() -> None:
    case = Case()
    case.status = GRPOJobStatus()
    taken, missing = Obstacle("NameTaken", "Service job is taken"), Obstacle("ClaimNotFound", "no claim")
    first = case.see(obstacle=taken)
    assert [(e.type, e.reason) for e in first.events] == [("Warning", "NameTaken")]
    assert (first.status.phase, first.mode) == ("Invalid", "keep")
    again = case.see(obstacle=taken)
    assert (again.status, again.events) == (first.status, ())
    assert [e.reason for e in case.see(obstacle=missing).events] == [missing.reason]


def _refused(name: str, uid: str, reason: str = "UnexpectedAdmissionError") -> ObservedPod:
    """Return a pod that its kubelet refused, as the API server shows it."""
    status = {"phase": "Failed", "reason": reason, "message": "Allocate failed: no healthy devices"}
    return pod_as_read(name, metadata={"uid": uid}, **status)


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfnvidia.com/gpu"])
def test_pods_that_a_kubelet_refuses_are_waited_for_until_it_admits_one(reason: str) -> None:
    """A device plugin restarts: each pod that the StatefulSet creates meanwhile is refused, for minutes."""
    case = Case(failurePolicy={"maxRestarts": 0})
    for at in range(0, 300, 3):
        case.see(pod(A), pod(B, uid=f"b-{at}", node=None), at=at)
        case.see(pod(A), _refused(B, f"b-{at}", reason), at=at + 1)
        assert (case.status.phase, case.status.attempt, case.status.restarts.total) == ("Starting", 0, 0)
        said = "pod job-b-0 on node node: its kubelet refuses it, and its StatefulSet creates another one: "
        assert said in case.message(Condition.RUNNING)
        assert "no healthy devices" in case.message(Condition.RUNNING)
        case.see(pod(A), at=at + 2, gone={f"b-{at}": _refused(B, f"b-{at}", reason)})
        assert (case.status.phase, case.status.last_failure) == ("Pending", None)
    case.see(pod(A, ready=True), pod(B, uid="b-last", ready=True), at=310)
    assert (case.status.phase, case.status.restarts.total) == ("Running", 0)
    assert [one.uid for one in case.status.members] == [f"{A}-uid", "b-last"]


def test_a_pod_that_is_refused_when_its_node_comes_back_costs_a_restart_that_does_not_count() -> None:
    case, pods = all_ready(failurePolicy={"maxRestarts": 0})
    case.see(pods[0], _refused(B, pods[1].uid), at=10)
    assert (case.status.phase, case.status.summary.reason) == ("Restarting", "UnexpectedAdmissionError")
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 0)
    assert "no healthy devices" in case.message(Condition.RESTARTING)
