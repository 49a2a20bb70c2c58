"""Pods on which sessions are opened: sessions spread, and a pod that fails or is full is left alone for a while."""

from collections import Counter

from grpo_spec.contract import EnvironmentGroup
from grpo_workload.environments.pods.choice import LONGEST_AVOIDED, choose, complaint, pods_of

GROUPS = (
    EnvironmentGroup(name="games", sessions=4, environments=("chess", "go"), addresses=("a:1", "b:1", "c:1")),
    EnvironmentGroup(name="large", sessions=8, environments=("go",), addresses=("d:1",)),
)


def take(pods, count, now=0.0):
    """Open sessions, and return the addresses."""
    found = []
    for _ in range(count):
        pod = choose(pods, (), now)
        pod.num_open += 1
        found.append(pod.address)
    return found


def test_sessions_spread_by_the_room_of_pods_and_ranks_begin_with_different_ones():
    pods = pods_of(GROUPS, 0)
    assert Counter(take(pods, 10)) == {"a:1": 2, "b:1": 2, "c:1": 2, "d:1": 4}
    assert Counter(take(pods, 10)) == {"a:1": 2, "b:1": 2, "c:1": 2, "d:1": 4}
    assert choose(pods, (), 0.0) is None, "all have as many as they take"
    assert [take(pods_of(GROUPS, rank), 1)[0] for rank in range(5)] == ["a:1", "b:1", "c:1", "d:1", "a:1"]


def test_rows_go_to_groups_that_serve_their_environment():
    pods = pods_of(GROUPS, 0)
    serving = {name: [pod.address for pod in pods if pod.serves(name)] for name in ("chess", "go", "chequers", None)}
    assert serving == {
        "chess": ["a:1", "b:1", "c:1"],
        "go": ["a:1", "b:1", "c:1", "d:1"],
        "chequers": [],
        None: ["a:1", "b:1", "c:1", "d:1"],
    }


def test_a_pod_that_fails_is_left_alone_for_longer_each_time_until_a_session_went_well():
    (pod, *_) = pods_of(GROUPS, 0)
    now, waits = 100.0, []
    for _ in range(6):
        pod.num_open += 1
        pod.failed("lost", now - 1, now)
        pod.closed(None)
        waits.append(pod.wait(now))
        assert not pod.has_room(now)
        now += 100
        assert pod.has_room(now)
    assert waits == [1, 2, 4, 8, LONGEST_AVOIDED, LONGEST_AVOIDED]
    pod.num_open += 1
    pod.closed(now)
    pod.failed("lost", now + 1, now + 2)
    assert pod.wait(now + 2) == 1


def test_an_outage_counts_once_whatever_number_of_sessions_it_ends():
    (pod, *_) = pods_of(GROUPS, 0)
    for number in range(50):
        pod.failed("lost", 10.0 + number, 100.0 + number / 10)
    assert pod.wait(100.0) == 1
    pod.failed("lost", 10.0, 200.0)
    assert pod.has_room(200.0)
    pod.closed(20.0)
    pod.failed("refused", 300.0, 300.0)
    assert pod.wait(300.0) == 2, "a session from before the outage that went well says nothing about it"


def test_a_full_pod_is_asked_again_soon_and_at_once_when_this_rank_has_closed_a_session():
    (pod, *_) = pods_of(GROUPS, 0)
    pod.num_open = 1
    pod.full(10.0)
    assert not pod.has_room(10.4)
    assert pod.has_room(10.6)
    pod.full(11.0)
    pod.closed(5.0)
    assert pod.has_room(11.0)


def test_a_complaint_says_what_to_raise_or_what_happened():
    pods = pods_of(GROUPS, 0)
    pods[1].full(0.0)
    assert complaint(pods, 60) == (
        "environmentPods.groups[games], environmentPods.groups[large]: no session became free for 60 s; 4 pods have "
        "20. Raise `replicas`, or `sessions` where pods have memory for more"
    )
    for pod in pods:
        pod.failed(f"it broke at {pod.address}", 1.0, 2.0)
    assert complaint(pods[:3], 60.4) == (
        "environmentPods.groups[games]: 0 of 3 pods could be used for 60.4 s (a:1: it broke at a:1; b:1: it broke "
        "at b:1; c:1: it broke at c:1)"
    )
