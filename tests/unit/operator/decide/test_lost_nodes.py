"""Nodes that are lost: pods deleted by force, restarts that do not count, nodes that the next attempts avoid."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.deletions import HELD_SECONDS, Deletion
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_spec.reports import ExitCode
from support.control_plane.jobs import NOW, pod, pod_as_read
from support.control_plane.passes import A, B, Case, all_ready, failed


def test_pods_of_a_lost_node_are_deleted_by_force_and_the_next_attempt_prefers_other_nodes() -> None:
    case, pods = all_ready()
    silent = replace(pods[1], ready=False)
    since = {"node": after(NOW, 10)}
    waits = case.see(pods[0], silent, at=60, lost_nodes=since)
    assert case.status.phase != "Restarting"
    assert case.status.summary.reason == "NodeNotReady"
    message = case.status.summary.message
    assert f"node node has not been ready since {rfc3339(since['node'])}; its pods: {B}" in message
    until = rfc3339(after(NOW, 70))
    assert f"the job gives up its pods and restarts at {until} (failurePolicy.nodeLostSeconds)" in message
    assert [e.reason for e in waits.events] == ["NodeNotReady"]
    assert case.see(pods[0], silent, at=61, lost_nodes=since).status == waits.status, "nothing new to write"
    case.see(pods[0], silent, at=70, lost_nodes=since)
    assert "on other nodes than node if possible" in case.message(Condition.RESTARTING)
    failure = case.status.last_failure
    assert failure.reason == "NodeLost"
    assert (case.status.restarts.total, case.status.restarts.counted) == (1, 0)
    going = replace(silent, deletion_time=after(NOW, 370))
    assert case.see(going, at=72, lost_nodes=since).deletions == (Deletion("Pod", B, silent.uid, force=True),)
    case.see(at=100)
    assert case.status.attempt == 1
    assert [node.name for node in case.status.avoid_nodes] == ["node"]
    case.see_all_ready(at=110)
    case.see(failed(A, attempt=1), at=4000)
    case.see(at=5000)
    assert case.status.avoid_nodes == ()


def test_a_lost_peer_whose_node_turns_out_to_be_lost_is_not_counted_after_all() -> None:
    case, _ = all_ready()
    lost, silent = failed(A, ExitCode.PEER_LOST, "PeerLost"), pod(B, uid=f"{B}-0")
    for at in (1, 50):
        case.see(lost, silent, at=at)
    silent = replace(silent, deletion_time=after(NOW, 400))
    assert (case.status.last_failure.reason, case.status.restarts.counted) == ("PeerLost", 1)
    case.see(silent, at=110, lost_nodes={"node": after(NOW, 45)})
    restarts = case.status.restarts
    assert (case.status.last_failure.reason, restarts.counted, restarts.total) == ("NodeLost", 0, 1)
    again = case.see(silent, at=112, lost_nodes={"node": after(NOW, 45)})
    assert again.status.restarts.counted == 0
    assert not again.events


def _stuck(restarts: int = 3, **more: Any) -> tuple[Case, ObservedPod]:
    """Return a job that restarts, or has failed, and a pod of it whose grace period ends 300 s after the job began."""
    case, pods = all_ready(failurePolicy={"maxRestarts": restarts})
    case.see(failed(A), pods[1])
    return case, replace(pods[1], deletion_time=after(NOW, 300), held_by="its container has not ended", **more)


NODES = [
    ("ready", {"ready_nodes": frozenset({"node"})}, False, HELD_SECONDS),
    ("ready, with a taint of the administrator", {"ready_nodes": frozenset({"node"})}, True, HELD_SECONDS),
    ("unknown", {}, False, HELD_SECONDS),
    ("unknown, but Kubernetes evicted the pod from it", {}, True, 60),
    ("gone", {"lost_nodes": {"node": after(NOW, 360)}, "absent_nodes": frozenset({"node"})}, False, 60),
]


@pytest.mark.parametrize(("seen", "by_taint", "seconds"), [case[1:] for case in NODES], ids=[case[0] for case in NODES])
def test_a_pod_that_does_not_end_is_deleted_by_force_soon_only_if_its_node_is_lost(
    seen: dict[str, Any], by_taint: bool, seconds: int
) -> None:
    case, stuck = _stuck(evicted_by_taint=by_taint)
    assert not case.see(stuck, at=300 + seconds, **seen).deletions
    assert case.see(stuck, at=301 + seconds, **seen).deletions == (Deletion("Pod", B, stuck.uid, force=True),)


@pytest.mark.parametrize("restarts", [3, 0], ids=["restarting", "failed"])
def test_a_pod_that_does_not_end_is_named_once_with_what_holds_it_and_the_deadline(restarts: int) -> None:
    case, stuck = _stuck(restarts)
    assert not [e for e in case.see(stuck, at=360).events if e.reason == "PodStuck"]
    (event,) = [e for e in case.see(stuck, at=361).events if e.reason == "PodStuck"]
    assert event.type == "Warning"
    assert f"pod {B} on node node did not end with its grace period" in event.message
    assert "its container has not ended" in event.message
    assert f"deleted by force at {rfc3339(after(NOW, 300 + HELD_SECONDS))}" in event.message
    again = case.see(stuck, at=363)
    assert not again.events
    assert case.message(Condition.SCHEDULED) == event.message


@pytest.mark.parametrize(
    ("metadata", "state", "says"),
    [
        ({"finalizers": ["example.com/a"]}, {"running": {}}, "its finalizers hold it (example.com/a)"),
        ({}, {"terminated": {"exitCode": 0}}, "a volume that does not unmount"),
        ({}, {"running": {}}, "its container has not ended"),
    ],
)
def test_what_holds_a_pod_is_read_from_it(metadata: dict[str, Any], state: dict[str, Any], says: str) -> None:
    going = {"deletionTimestamp": rfc3339(NOW)} | metadata
    assert says in pod_as_read(B, {"state": state}, metadata=going).held_by


@pytest.mark.parametrize(
    ("inits", "why"),
    [
        (
            [{"name": "get", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
            "init container get: CrashLoopBackOff",
        ),
        ([{"name": "get", "state": {"running": {}}}], "PodInitializing"),
        (
            [{"name": "a", "state": {"terminated": {}}}, {"state": {"waiting": {"reason": "PodInitializing"}}}],
            "PodInitializing",
        ),
    ],
)
def test_a_pod_says_which_init_container_it_waits_for(inits: list[Any], why: str) -> None:
    own = {"state": {"waiting": {"reason": "PodInitializing"}}}
    assert pod_as_read("p", own, initContainerStatuses=inits).waiting == why
