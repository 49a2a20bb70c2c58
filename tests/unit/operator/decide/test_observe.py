"""Reading of objects: equal ones are the same bytes, numbers and texts have bounds, nodes are lost or ready."""

from typing import Any

import pytest

from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.deletions import find_left
from grpo_operator.decide.objects import was_applied
from grpo_operator.decide.observe import lost_since, pack, read_child
from support.control_plane.jobs import NOW, observed, pod, pod_as_read


def test_equal_objects_are_the_same_bytes() -> None:
    """Whatever they share in memory: objects of a watch share less than those that the operator built."""
    said = "".join(["a", "bc"])
    assert pack({"first": said, "second": said}) == pack(
        {"first": "".join(["ab", "c"]), "second": "".join(["a", "bc"])}
    )


def test_a_resource_version_is_kept_where_it_is_sent_back_and_nowhere_else() -> None:
    """A StatefulSet's changes with each of its pods."""
    metadata = {"name": "one", "uid": "u", "resourceVersion": "7", "generation": 2}
    assert "resourceVersion" not in read_child("StatefulSet", {"metadata": metadata}).raw["metadata"]
    assert read_child("Workload", {"metadata": metadata}).raw["metadata"]["resourceVersion"] == "7"


@pytest.mark.parametrize(("operations", "expected"), [([], True), (["Update"], False), (["Update", "Apply"], True)])
def test_a_child_that_was_only_created_was_not_applied(operations: list[str], expected: bool) -> None:
    entries = [{"manager": "grpo-operator", "operation": operation} for operation in operations]
    entries.append({"manager": "grpo-operator", "operation": "Apply", "subresource": "scale"})
    assert was_applied({"metadata": {"managedFields": entries}}) is expected


def test_a_node_is_lost_since_it_is_not_ready_or_is_gone() -> None:
    def node(ready: str, **more: str) -> dict[str, Any]:
        return {"status": {"conditions": [{"type": "Ready", "status": ready, **more}]}}

    before = after(NOW, -60)
    assert lost_since(node("True", lastTransitionTime=rfc3339(before)), NOW) is None
    assert lost_since(node("Unknown", lastTransitionTime=rfc3339(before)), NOW) == before
    assert lost_since(node("False"), NOW) == NOW
    assert lost_since(None, NOW) == NOW


def test_what_a_pod_says_has_bounds() -> None:
    """Those of the status's schema, of which the API server would refuse the whole status."""
    terminated = {"exitCode": 1, "reason": "r" * 999, "message": "m" * 9999, "finishedAt": rfc3339(NOW)}
    labels = {"training.grpo.dev/attempt": "9" * 19}  # no 64 bits hold it
    read = pod_as_read("p", {"state": {"terminated": terminated}}, metadata={"labels": labels}, podIP="10.0.0.7")
    assert (read.attempt, read.ip) == (-1, "10.0.0.7")
    assert (len(read.outcome.reason), len(read.outcome.message)) == (128, 4096)
    assert pod_as_read("p").ip is None


def test_pods_that_something_keeps_come_first_by_their_names() -> None:
    kept = pod("a", node="z", deletion_time=NOW)
    others = pod("b", node="y", deletion_time=NOW), pod("0")
    left = find_left(observed(kept, *others, absent_nodes=frozenset("yz")), NOW)
    whys = [(name, one.why) for name, one in left.items()]
    assert whys == [("a", "its node z no longer exists"), ("b", "its node y no longer exists"), ("0", "")]
