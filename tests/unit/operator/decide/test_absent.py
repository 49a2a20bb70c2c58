"""A pod that is missing, or not prepared by its node, is found, and events say why."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.names import Condition
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.absent import Missing, explain, explain_unprepared, find_missing, find_unprepared, waiting_for
from grpo_operator.decide.conditions import find
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.second_look import News, news
from grpo_spec.reasons import Reason
from support.control_plane.jobs import NOW, a_set, observed, pod, pod_as_read
from support.control_plane.passes import A, B, Case

REFUSED = Reason.CHILD_REFUSED, f"the cluster refuses pod {B}, and is asked again: said"


def event(note: str, at: str = NOW, **more: Any) -> dict[str, Any]:
    """Return an event as its controller writes it."""
    return {"note": note, "deprecatedLastTimestamp": rfc3339(at), "eventTime": None, **more}


def test_only_pods_that_a_set_should_have_created_are_missing() -> None:
    case = Case()
    sets = (a_set("job-a"), a_set("job-b"))
    assert find_missing(case.status, case.topology, observed()) is None, "the sets do not exist yet"
    both = observed(pod(A), children=sets)
    assert find_missing(case.status, case.topology, both) == Missing(B, sets[1])
    held = observed(pod(A), children=(sets[0], a_set("job-b", replicas=0)))
    assert find_missing(case.status, case.topology, held) is None, "the operator lets it wait"
    case.edit(suspend=True)
    case.see()
    assert find_missing(case.status, case.topology, both) is None


@pytest.mark.parametrize(
    ("note", "reason", "words"),
    [
        ("create Pod p in StatefulSet s failed error: no", Reason.CHILD_REFUSED, "no"),
        ("Create Pod p in StatefulSet s failed error: exceeded quota: q", Reason.QUOTA_EXCEEDED, "exceeded quota: q"),
        ("(combined from similar events): Error creating: failed quota: q", Reason.QUOTA_EXCEEDED, "failed quota: q"),
    ],
)
def test_the_words_are_those_of_the_cluster(note: str, reason: Reason, words: str) -> None:
    said = explain(Missing(B, a_set("job-b")), [event(note)], NOW)
    assert said == (reason, f"the cluster refuses pod {B}, and is asked again: {words}")


def test_the_newest_refusal_of_the_attempt_is_quoted_and_none_of_earlier_ones() -> None:
    missing, series = Missing(B, a_set("job-b")), {"series": {"lastObservedTime": rfc3339(after(NOW, 9))}}
    events = [
        event("late", **series),
        event("early", after(NOW, 5)),
        event("old", after(NOW, -600)),
        {"note": "no time"},
    ]
    said = explain(missing, events, NOW)
    assert said[1].endswith(": late")
    assert explain(missing, events[2:], NOW) is None
    assert explain(missing, [event('pods "job-b-0" already exists')], NOW) is None, "whose it is can be seen"


def test_a_refused_pod_is_a_warning_that_is_written_at_once() -> None:
    case = Case()
    before = case.status
    said = case.see(pod(A), why_absent=REFUSED)
    scheduled = find(said.status, Condition.SCHEDULED)
    assert scheduled.reason == "ChildRefused"
    assert scheduled.message.startswith(f"1 of 2 pods exist; {REFUSED[1]}; 1 of 2 pods have a node, the last since")
    assert [(one.type, one.reason, one.message) for one in said.events] == [
        ("Warning", "ChildRefused", scheduled.message)
    ]
    assert news(before, said.status) == News.URGENT
    assert said.status.summary.message == scheduled.message


def preparing(name: str, *, is_ready: str = "False", **more: Any) -> ObservedPod:
    """Return a pod as its kubelet says it while it mounts volumes and makes the network."""
    conditions = [{"type": "PodReadyToStartContainers", "status": is_ready}]
    return pod_as_read(name, {"state": {"waiting": {"reason": "ContainerCreating"}}, **more}, conditions=conditions)


def test_only_pods_whose_volumes_are_not_mounted_are_asked_about() -> None:
    case, ended = Case(), {"lastState": {"terminated": {"exitCode": 1}}}
    held = preparing(B)
    assert find_unprepared(case.status, observed(preparing("job-c-0"), held)) is held, "the first by its name"
    others = (preparing(A, is_ready="True"), preparing(B, **ended), replace(held, deletion_time=NOW))
    for one in others:
        assert find_unprepared(case.status, observed(one)) is None, "it pulls its image, has run, or is being deleted"
    assert find_unprepared(case.status, observed(environment_pods={B: held})) is held
    assert find_unprepared(case.status, observed(downloaders=(held,))) is held


def test_the_job_says_what_a_kubelet_warns_of_and_which_volume_comes_before_that_some_do_not_mount() -> None:
    case, pods = Case(), (pod(A), preparing(B))
    case.see(*pods)
    assert case.message(Condition.RUNNING) == "0 of 2 pods are ready"
    case.see(pod(A), preparing(B, is_ready="True"))
    assert case.message(Condition.RUNNING) == f"0 of 2 pods are ready; pod {B} on node node pulls its image"
    missing = 'MountVolume.SetUp failed for volume "creds" : secret "creds" not found'
    fails: dict[str, Any] = {"reason": "FailedMount", "type": "Warning"}
    events = [
        event("older", at=after(NOW, -9), **fails),
        event(missing, **fails),
        event("Unable to attach or mount volumes: unmounted volumes=[creds]", at=after(NOW, 9), **fails),
        event("attached", at=after(NOW, 20), reason="SuccessfulAttachVolume", type="Normal"),
        {"note": "no time"},
    ]
    said = explain_unprepared([*events, event("", at=after(NOW, -1), reason="Pulling")])
    assert explain_unprepared([*events, event("", at=after(NOW, 9), reason="Pulling")]) is None, "it has got over it"
    assert explain_unprepared(()) is None
    seen = waiting_for(said[1], pods[1], observed(*pods))
    found = case.see(*seen.pods.values())
    assert (found.status.phase, found.status.summary.reason) == ("Starting", "ContainerWaiting")
    assert found.status.summary.message == f"pod {B} on node node: FailedMount: {missing}"
    assert [(one.type, one.reason) for one in found.events] == [("Warning", "ContainerWaiting")]
