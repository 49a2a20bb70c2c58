"""A job owns what its UID controls. Users' objects with copied labels are left alone, and named where they stand in
the way.
"""

from typing import Any

import pytest

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.status import ConditionStatus
from grpo_operator.decide.conditions import find, holds
from support.control_plane.memory_store import Object
from support.control_plane.simulated_cluster import NAMESPACE
from support.control_plane.simulation import Simulation

POLICY = {"backoffSeconds": 1, "maxBackoffSeconds": 2}
HOLD = "example.com/hold"


def put(world: Simulation, kind: str, name: str, labels: dict[str, str] | None = None) -> Object:
    """Create an object that nobody owns; it must stay as it is."""
    made: dict[str, Any] = {"kind": kind, "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels or {}}}
    raw = world.cluster.store.put(made | {"apiVersion": names.api_version(kind), "spec": {}, "status": {}})
    world.truth.foreign[kind, NAMESPACE, name] = raw
    return raw


def take_away(world: Simulation, kind: str, name: str) -> None:
    del world.truth.foreign[kind, NAMESPACE, name]
    world.cluster.store.remove(kind, NAMESPACE, name)


def condition(world: Simulation, kind: Condition) -> ConditionStatus | None:
    return find(world.status("a"), kind)


def sent(world: Simulation, verb: str, what: str) -> int:
    """Return how often operators sent a request about a kind, or an object of this name."""
    requests = (one for operator in world.operators for one in operator.api.requests)
    return sum(one.verb == verb and what in (one.kind, one.name) for one in requests)


def test_copies_of_a_pods_labels_are_left_alone_and_not_waited_for() -> None:
    world = Simulation.running(failurePolicy=POLICY)
    labels = world.cluster.pods(job="a")[0]["metadata"]["labels"]
    put(world, "Service", "exposed", labels)
    put(world, "Pod", "a-a-0-debug", labels)
    world.go_on(5)
    world.fail("a")
    world.go_on(8)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Running")
    world.suspend_or_resume("a")
    world.go_on(8)
    assert condition(world, Condition.SUSPENDED).reason == "Suspended"
    world.delete("a")
    world.go_on(3, garbage=True)
    world.create("a")
    world.go_on(8, garbage=True)
    assert world.status("a").phase == "Running"
    assert {kind for kind, _, _ in world.truth.foreign} == {"Service", "Pod"}


def test_a_pod_that_has_the_name_of_one_of_the_next_attempt_is_named_before_it_begins() -> None:
    world = Simulation.running(failurePolicy=POLICY)
    labels = world.cluster.pods(job="a")[0]["metadata"]["labels"]
    world.suspend_or_resume("a")
    world.go_on(5)
    put(world, "Pod", "a-b-0", labels)
    world.suspend_or_resume("a")
    world.go_on(3)
    refused = condition(world, Condition.ACCEPTED)
    assert (refused.status, refused.reason) == ("False", "NameTaken")
    assert refused.message.startswith("Pod a-b-0 already exists and has no owner: it is not adopted; delete it")
    assert holds(world.status("a"), Condition.RECONCILING)
    take_away(world, "Pod", "a-b-0")
    world.go_on(15)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Running")


def test_a_pod_without_labels_that_has_the_name_of_one_that_is_missing_is_named() -> None:
    world = Simulation(failurePolicy=POLICY)
    put(world, "Pod", "a-a-0")
    world.create("a")
    world.go_on(12)
    taken = condition(world, Condition.SCHEDULED)
    assert (taken.status, taken.reason) == ("False", "NameTaken")
    assert taken.message.startswith("0 of 2 pods exist; Pod a-a-0 already exists and has no owner")
    before = sent(world, "list", "Pod")
    world.go_on(300)
    assert 10 <= sent(world, "list", "Pod") - before <= 24, "each operator asks less and less often"
    take_away(world, "Pod", "a-a-0")
    world.go_on(8)
    assert world.status("a").phase == "Running"


def test_a_child_that_a_finalizer_holds_is_deleted_once_and_named() -> None:
    world = Simulation.running(failurePolicy=POLICY)
    contract = world.cluster.store.get("ConfigMap", NAMESPACE, names.contract_name("a", 0))
    world.cluster.store.edit(contract, metadata={"finalizers": [HOLD]})
    world.fail("a")
    world.go_on(8)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Running")
    before = sent(world, "delete", "a-0")
    world.go_on(30)
    assert sent(world, "delete", "a-0") == before > 0
    said = f"ConfigMap a-0 was deleted, and its finalizers hold it ({HOLD})"
    assert said in condition(world, Condition.RUNNING).message


def test_a_set_that_lost_its_labels_is_still_stopped() -> None:
    world = Simulation.running(failurePolicy=POLICY)
    group = world.cluster.store.get("StatefulSet", NAMESPACE, "a-a")
    world.suspend_or_resume("a")
    world.cluster.store.edit(group, metadata={"labels": {}})
    world.go_on(8)
    assert condition(world, Condition.SUSPENDED).reason == "Suspended"
    assert not world.cluster.pods(job="a")


def test_the_contract_of_a_running_attempt_gets_its_labels_back() -> None:
    world = Simulation.running(failurePolicy=POLICY)
    contract = world.cluster.store.get("ConfigMap", NAMESPACE, "a-0")
    world.cluster.store.edit(contract, metadata={"labels": {}})
    world.go_on(20)
    again = world.cluster.store.get("ConfigMap", NAMESPACE, "a-0")
    assert again["metadata"] | {"resourceVersion": 0} == contract["metadata"] | {"resourceVersion": 0}


@pytest.mark.parametrize(("kind", "name"), [("ConfigMap", "a-0"), ("StatefulSet", "a-a"), ("Service", "a")])
@pytest.mark.parametrize("finalizers", [[], [HOLD]])
def test_what_an_earlier_job_left_without_labels_is_deleted(kind: str, name: str, finalizers: list[str]) -> None:
    """Garbage collection missed it, and no pass has seen it."""
    world = Simulation(failurePolicy=POLICY)
    owner = {"kind": names.KIND, "name": "a", "uid": "earlier", "controller": True}
    metadata = {"name": name, "namespace": NAMESPACE, "ownerReferences": [owner], "finalizers": finalizers}
    made = {"apiVersion": names.api_version(kind), "kind": kind, "metadata": metadata, "spec": {"replicas": 0}}
    world.cluster.store.put(made)
    world.create("a")
    world.go_on(70)
    assert sent(world, "delete", name) == 1
    if finalizers:
        assert f"it is gone once who set its finalizers removes them: {HOLD}" in str(world.status("a").conditions)
        world.cluster.store.remove(kind, NAMESPACE, name)
        world.go_on(70)
    assert world.status("a").phase == "Running"


def test_the_set_of_an_earlier_job_is_found_by_its_pods_whatever_its_labels_say() -> None:
    world = Simulation.running(failurePolicy=POLICY)
    group = world.cluster.store.get("StatefulSet", NAMESPACE, "a-a")
    world.cluster.store.edit(group, metadata={"labels": {names.LABEL_JOB: "another"}})
    world.delete("a")
    world.create("a")
    world.go_on(30)
    assert world.status("a").phase == "Running"


def test_a_refusal_is_not_held_against_a_job_that_is_suspended() -> None:
    """Nobody looks at what is in the way while the job rests."""
    world = Simulation(failurePolicy=POLICY)
    put(world, "Service", "a")
    world.create("a")
    world.go_on(5)
    assert (world.status("a").phase, condition(world, Condition.ACCEPTED).reason) == ("Invalid", "NameTaken")
    world.suspend_or_resume("a")
    world.go_on(5)
    take_away(world, "Service", "a")
    world.go_on(5)
    assert (world.status("a").phase, condition(world, Condition.ACCEPTED).status) == ("Suspended", "Unknown")
    assert "Service a already exists" in condition(world, Condition.ACCEPTED).message
    world.suspend_or_resume("a")
    world.go_on(5)
    assert (world.status("a").phase, condition(world, Condition.ACCEPTED).status) == ("Running", "True")
