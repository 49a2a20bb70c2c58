"""Pods that are gone before a list shows how they ended: their final state names the cause.

A pass waits for that state for a limited time.
"""

from dataclasses import replace

from grpo_operator.api.status import Disruption, GRPOJobStatus
from grpo_operator.api.times import after
from grpo_operator.decide.blame import has_unexplained_pods
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import plan
from grpo_operator.runtime.deleted_pods import KEPT_SECONDS, PATIENCE_SECONDS, DeletedPods
from grpo_spec.reports import ExitCode
from support.control_plane.jobs import NOW, ended, observed, pod, world

JOB, TOPOLOGY = world()
A, B = (pod(member.pod, uid=f"{member.pod}-0", ready=True) for member in TOPOLOGY.members)
RECREATED = pod(B.name, uid="another")


def see(status: GRPOJobStatus, *pods: ObservedPod, gone: ObservedPod | None = None) -> GRPOJobStatus:
    seen = observed(*pods, gone={gone.uid: gone} if gone else {})
    return plan(JOB, TOPOLOGY, status, seen, {}, NOW).status


def running() -> GRPOJobStatus:
    return see(see(GRPOJobStatus()), A, B)


def failure_of(gone: ObservedPod | None) -> tuple[str, int]:
    status = see(running(), A, RECREATED, gone=gone)
    return status.last_failure.reason, status.restarts.counted


def test_the_final_state_of_a_deleted_pod_names_the_cause_although_a_new_pod_has_its_name() -> None:
    evicted = replace(B, disruption=Disruption(reason="Evicted", message="low on memory"), deletion_time=NOW)
    assert failure_of(evicted) == ("Evicted", 0)
    refused = replace(B, endings=(Ending(ended(-1, "UnexpectedAdmissionError")),), deletion_time=NOW)
    assert failure_of(refused) == ("UnexpectedAdmissionError", 0)
    stopped = replace(B, endings=(Ending(ended(ExitCode.STOPPED, "Stopped")),), deletion_time=NOW)
    assert failure_of(stopped) == ("PodReplaced", 1)
    assert failure_of(replace(B, deletion_time=NOW)) == failure_of(None) == ("PodReplaced", 1)


def test_a_deleted_pod_of_another_attempt_is_ignored() -> None:
    stranger = replace(B, uid="stranger", disruption=Disruption(reason="Evicted", message=""))
    assert see(running(), A, B, gone=stranger) == running()


def test_a_pod_is_unexplained_while_neither_the_list_nor_the_watch_shows_how_it_ended() -> None:
    status = running()
    assert not has_unexplained_pods(status, observed(A, B))
    assert has_unexplained_pods(status, observed(A, RECREATED))
    assert has_unexplained_pods(status, observed(A))
    assert not has_unexplained_pods(status, observed(A, RECREATED, gone={B.uid: B}))
    recorded = see(status, A, replace(B, endings=(Ending(ended(ExitCode.DONE)),)))
    assert not has_unexplained_pods(recorded, observed(A))


def test_the_watch_is_awaited_for_a_limited_time_and_recorded_pods_are_dropped() -> None:
    seconds = [0.0]
    deleted = DeletedPods(lambda: seconds[0])
    assert deleted.may_still_arrive()
    seconds[0] = PATIENCE_SECONDS
    assert not deleted.may_still_arrive()
    deleted.remember(pod("b", uid="1"))
    deleted.remember(pod("b", uid="2"))
    deleted.recorded(["1"])
    assert [*deleted] == [pod("b", uid="2")]
    assert deleted.may_still_arrive(), "the wait for another pod starts again"


def test_a_pod_was_gone_when_the_watch_said_so() -> None:
    seconds = [100.0]
    deleted = DeletedPods(lambda: seconds[0])
    deleted.remember(pod("b", uid="1"))
    seconds[0] = 107.0
    assert [one.gone_at for one in deleted.seen(after(NOW, 10))] == [after(NOW, 3)]


def test_an_operator_that_records_nothing_keeps_only_recent_pods() -> None:
    seconds = [0.0]
    deleted = DeletedPods(lambda: seconds[0])
    for number in range(50):
        seconds[0] = number * KEPT_SECONDS / 5
        deleted.remember(pod("a", uid=str(number)))
    assert [one.uid for one in deleted] == ["45", "46", "47", "48", "49"]
