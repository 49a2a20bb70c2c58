"""Pods that are gone before a list can tell how they ended."""

from dataclasses import replace
from typing import Any

from jobs import NOW, ended, observed, pod, world

from grpo_operator.jobstatus import Disruption, GRPOJobStatus
from grpo_operator.lastwords import PATIENCE_SECONDS, LastWords
from grpo_operator.observe import ObservedPod
from grpo_operator.plan import plan
from grpo_operator.verdict import are_unheard_of
from grpo_workload.contract import ExitCode

JOB, TOPOLOGY = world()
A, B = (pod(member.pod, uid=f"{member.pod}-0", ready=True) for member in TOPOLOGY.members)
ANEW = pod(B.name, uid="another")


def look(status: GRPOJobStatus, *pods: ObservedPod, gone: ObservedPod | None = None) -> GRPOJobStatus:
    seen = replace(observed(*pods), gone={gone.uid: gone} if gone else {})
    return plan(JOB, TOPOLOGY, status, seen, {}, NOW).status


def running() -> GRPOJobStatus:
    return look(look(GRPOJobStatus()), A, B)


def failure_of(gone: ObservedPod) -> tuple[str, int]:
    status = look(running(), A, ANEW, gone=gone)
    assert status.last_failure is not None
    return status.last_failure.reason, status.restarts.counted


def raw(uid: str) -> dict[str, Any]:
    return {"metadata": {"uid": uid}}


def test_how_a_pod_ended_counts_although_another_has_its_name() -> None:
    evicted = replace(B, disruption=Disruption(reason="Evicted", message="low on memory"), deletion_time=NOW)
    assert failure_of(evicted) == ("Evicted", 0)
    refused = replace(B, outcome=ended(-1, "UnexpectedAdmissionError"), deletion_time=NOW)
    assert failure_of(refused) == ("UnexpectedAdmissionError", 1)
    stopped = replace(B, outcome=ended(ExitCode.STOPPED, "Stopped"), deletion_time=NOW)
    assert failure_of(stopped) == ("PodReplaced", 1)
    assert failure_of(replace(B, deletion_time=NOW)) == ("PodReplaced", 1)


def test_a_pod_of_another_attempt_is_none_of_the_members() -> None:
    stranger = replace(B, uid="stranger", disruption=Disruption(reason="Evicted", message=""))
    assert look(running(), A, B, gone=stranger) == running()


def test_a_pod_is_unheard_of_while_neither_the_list_nor_the_watch_tells_how_it_ended() -> None:
    status = running()
    assert not are_unheard_of(status, observed(A, B))
    assert are_unheard_of(status, observed(A, ANEW))
    assert are_unheard_of(status, observed(A))
    assert not are_unheard_of(status, replace(observed(A, ANEW), gone={B.uid: B}))
    told = look(status, A, replace(B, outcome=ended(ExitCode.DONE)))
    assert not are_unheard_of(told, observed(A))


def test_the_watch_is_waited_for_once_and_what_was_taken_down_is_forgotten() -> None:
    seconds = [0.0]
    words: LastWords[str] = LastWords(lambda: seconds[0])
    assert words.may_come("job")
    seconds[0] = PATIENCE_SECONDS
    assert not words.may_come("job")
    assert words.may_come("another job")
    words.heard("job", raw("1"))
    words.heard("job", raw("2"))
    words.taken_down("job", ["1"])
    assert words.of("job") == [raw("2")]
    assert words.may_come("job"), "another pod is waited for anew"
    words.forget("job")
    assert words.of("job") == []
