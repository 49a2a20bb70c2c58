"""A child is applied again if it differs from what the last apply made of it, and only then.

`store` stands for what lies behind an apply: an API server that leaves fields out, sets defaults and rewrites
quantities, and webhooks that add to lists and maps, in any way.
"""

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api import names
from grpo_operator.layout.manifests import manifests
from grpo_operator.runtime.applied import Applied, contains
from support.control_plane.jobs import world

LEAVES = st.sampled_from([False, True, 0, 1, "", "a", "b", "1000m", None])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("pqrs"), inner, max_size=3),
    max_leaves=12,
)
SPECS = st.dictionaries(st.sampled_from("pqrs"), VALUES, min_size=1, max_size=4)
LABELS = {"name": "child", "labels": {"attempt": "0"}, "ownerReferences": [{"uid": "job"}]}


def _manifest(spec: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "StatefulSet", "metadata": LABELS, "spec": spec}


def store(wanted: Any, draw: Any) -> Any:
    """Return what is stored when `wanted` is applied."""
    if isinstance(wanted, dict):
        kept = {key: value for key, value in wanted.items() if value or draw(st.booleans())}
        added = {"injected": 1} if draw(st.booleans()) else {}
        return {key: store(value, draw) for key, value in kept.items()} | added
    if isinstance(wanted, list):
        return [store(item, draw) for item in wanted] + (["sidecar"] if draw(st.booleans()) else [])
    return "1" if wanted == "1000m" else wanted


def _stored(manifest: dict[str, Any], draw: Any) -> dict[str, Any]:
    known = {"uid": "u", "resourceVersion": "1", "managedFields": []}
    return manifest | {"metadata": manifest["metadata"] | known, "spec": store(manifest["spec"], draw)}


def _at(node: Any, path: Sequence[Any]) -> Any:
    """Return what lies at a path, or a value that nothing else equals."""
    for step in path:
        inside = step in node if isinstance(node, dict) else isinstance(node, list) and step < len(node)
        if not inside:
            return object()
        node = node[step]
    return node


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(deeper for key, value in items for deeper in _paths(value, (*path, key)))]


@given(SPECS, st.data())
def test_whatever_the_cluster_makes_of_a_manifest_one_apply_is_enough(
    spec: dict[str, Any], data: st.DataObject
) -> None:
    manifest, applied = _manifest(spec), Applied()
    live = _stored(manifest, data.draw)
    applied.remember(manifest, live)
    assert applied.is_in_force(manifest, live)
    later = live["metadata"] | {"resourceVersion": "2", "annotations": {"seen": "now"}}
    assert applied.is_in_force(manifest, live | {"metadata": later, "status": {"replicas": 1}})


@given(SPECS, st.data())
def test_a_change_of_anything_that_was_sent_and_stored_is_noticed(spec: dict[str, Any], data: st.DataObject) -> None:
    manifest, applied = _manifest({"replicas": 2} | spec), Applied()
    live = _stored(manifest, data.draw)
    applied.remember(manifest, live)
    kept = [p for p in _paths(manifest["spec"]) if p and repr(_at(live["spec"], p)) == repr(_at(manifest["spec"], p))]
    *parents, key = data.draw(st.sampled_from(kept or [("replicas",)]))
    changed = copy.deepcopy(live)
    node = _at(changed["spec"], parents)
    if data.draw(st.booleans()):
        node[key] = {"other": 1} if node[key] != {"other": 1} else "other"
    else:
        del node[key]
    assert not applied.is_in_force(manifest, changed)
    for other in ({"labels": {"attempt": "1"}}, {"ownerReferences": []}):
        assert not applied.is_in_force(manifest, live | {"metadata": live["metadata"] | other})


@given(SPECS, SPECS, st.data())
def test_another_manifest_is_applied(old: dict[str, Any], new: dict[str, Any], data: st.DataObject) -> None:
    applied = Applied()
    live = _stored(_manifest(old), data.draw)
    applied.remember(_manifest(old), live)
    in_force = applied.is_in_force(_manifest(new), live)
    assert in_force == (contains(live, _manifest(new)) or repr(new) == repr(old))


def test_another_type_of_the_same_value_is_a_difference() -> None:
    assert not contains({"a": 1}, {"a": True})
    assert not contains({"a": "1"}, {"a": "1000m"})
    assert contains({"a": [1], "more": 2}, {"a": [1]})
    assert not contains({"a": [1, 2]}, {"a": [1]})


def test_children_are_in_force_as_soon_as_the_cluster_has_them() -> None:
    for child in manifests(*world(), 0):
        assert contains(child, child)


def test_a_pod_group_stays_as_its_attempt_began_whatever_the_spec_says_now() -> None:
    """The API server refuses a change of it, and would refuse every pass then."""

    def group(**scheduling: str) -> dict[str, Any]:
        made = manifests(*world(scheduling={"gang": "Native"} | scheduling), 0)
        return next(child for child in made if child["kind"] == names.GANG_KIND)

    began = group()
    changed = group(topologyKey="rack", topologyPolicy="Required")
    assert not contains(began, changed)
    assert Applied().is_in_force(changed, began)
