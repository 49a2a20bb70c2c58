"""A child is created only where its name is free, kept if the job has it, and applied only where it was seen."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_operator.decide.observe import Observed
from grpo_operator.passes.children import Changes, ChildApplier
from grpo_operator.runtime.applied import Applied
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ConflictError, ForeignError
from grpo_operator.runtime.ownership import describe_foreign, noted_as_applied
from support.control_plane.memory_api import MemoryApi, failure
from support.control_plane.memory_store import Store

OURS = {"apiVersion": "training.grpo.dev/v1alpha1", "kind": "GRPOJob", "name": "job", "uid": "1", "controller": True}
CONTRACT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "job-0", "namespace": "ns", "labels": {}, "ownerReferences": [OURS]},
    "data": {"contract.json": "{}"},
    "immutable": True,
}


async def test_it_is_created_once_and_then_kept_as_it_is() -> None:
    cluster = Cluster(api := MemoryApi(Store()))
    first = await cluster.create(copy.deepcopy(CONTRACT))
    assert [(one.verb, one.kind) for one in api.requests] == [("create", "ConfigMap")]
    again = await cluster.create(CONTRACT | {"data": {"contract.json": "of another release"}})
    assert again == first
    assert (again["kind"], again["data"]) == ("ConfigMap", CONTRACT["data"])


@pytest.mark.parametrize("owners", [[], [OURS | {"name": "other", "uid": "2"}]], ids=["nobody's", "another job's"])
async def test_that_of_another_owner_is_left_alone(owners: list[dict[str, Any]]) -> None:
    api = MemoryApi(Store())
    theirs = copy.deepcopy(CONTRACT)
    theirs["metadata"]["ownerReferences"] = owners
    kept = copy.deepcopy(api.store.put(theirs))
    with pytest.raises(ForeignError, match=r"ConfigMap job-0 already exists and .*: it is not adopted"):
        await Cluster(api).create(CONTRACT)
    assert api.store.get("ConfigMap", "ns", "job-0") == kept


async def test_an_apply_reaches_only_the_object_that_was_seen() -> None:
    cluster = Cluster(api := MemoryApi(Store()))
    made = await cluster.create(copy.deepcopy(CONTRACT | {"immutable": False}))
    changed = CONTRACT | {"data": {"contract.json": "changed"}, "immutable": False}
    for uid in ("of another", ""):
        with pytest.raises(ConflictError):
            await cluster.apply(changed, uid, was_applied=True)
    assert (await cluster.apply(changed, made["metadata"]["uid"], was_applied=False))["data"] == changed["data"]
    api.store.remove("ConfigMap", "ns", "job-0")
    with pytest.raises(ConflictError):
        await cluster.apply(changed, made["metadata"]["uid"], was_applied=True)
    assert api.store.get("ConfigMap", "ns", "job-0") is None


class Trimming(MemoryApi):
    """Stores labels in its own way, as API servers do with quantities."""

    async def request(self, verb: str, kind: str, path: str, **params: Any) -> dict[str, Any]:
        if verb in ("create", "apply"):
            metadata = params["body"]["metadata"]
            params["body"] = params["body"] | {"metadata": metadata | {"labels": {"cpu": "1"}}}
        return await super().request(verb, kind, path, **params)


async def test_what_was_just_created_is_not_applied_too_however_it_is_stored() -> None:
    odd = copy.deepcopy(CONTRACT | {"kind": "Service", "immutable": False})
    odd["metadata"]["labels"] = {"cpu": "1000m"}
    job, observed = Mock(namespace="ns", uid="1"), Observed(pods={})
    nothing = Mock(deletions=(), delete_job=False, renewals=())
    api, applied = Trimming(Store()), Applied()
    changer = ChildApplier(Cluster(api), applied, lambda _: None)
    await changer.make(job, observed, Changes(nothing, applies=[odd]))
    assert [one.verb for one in api.requests] == ["create"]
    assert applied.is_in_force(odd, api.store.get("Service", "ns", "job-0") or {})


def _live(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"uid": "u", "managedFields": list(entries)}}


def test_fields_are_noted_as_applied_once_and_only_ours() -> None:
    theirs = {"manager": "kube-controller-manager", "operation": "Update"}
    created = {"manager": "grpo-operator", "operation": "Update"}
    of_status, applied = created | {"subresource": "status"}, created | {"operation": "Apply"}
    assert noted_as_applied(_live(theirs, of_status)) == []
    assert noted_as_applied(_live(applied, created)) == []
    assert noted_as_applied(_live(theirs, created)) == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "test", "path": "/metadata/managedFields/1/manager", "value": "grpo-operator"},
        {"op": "replace", "path": "/metadata/managedFields/1/operation", "value": "Apply"},
    ]


class Older(MemoryApi):
    """Has the PodGroups of Kubernetes 1.36. Notes where what is sent; answers no other question for kinds."""

    def __init__(self) -> None:
        super().__init__(Store())
        self.sent: list[tuple[str, Any]] = []

    async def request(self, verb: str, kind: str, path: str, **params: Any) -> dict[str, Any]:
        self.sent.append((path, params.get("body")))
        if kind != "APIResourceList":
            return await super().request(verb, kind, path, **params)
        if path == "/apis/scheduling.k8s.io/v1alpha2":
            return {"resources": [{"kind": "PodGroup"}]}
        raise failure(404, "the server could not find the requested resource")


async def test_a_pod_group_is_sent_as_kubernetes_1_36_has_it_where_that_is_what_is_served() -> None:
    newer = {
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": "job-0", "namespace": "ns", "labels": {}, "ownerReferences": [OURS]},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}, "disruptionMode": {"all": {}}},
    }
    cluster = Cluster(api := Older())
    assert await cluster.serves("PodGroup")
    await cluster.create(copy.deepcopy(newer))
    path, sent = api.sent[-1]
    assert path == "/apis/scheduling.k8s.io/v1alpha2/namespaces/ns/podgroups"
    older = {"schedulingPolicy": newer["spec"]["schedulingPolicy"], "disruptionMode": "PodGroup"}
    assert (sent["apiVersion"], sent["spec"]) == ("scheduling.k8s.io/v1alpha2", older)


def test_a_pod_of_another_set_of_the_same_name_is_told_apart() -> None:
    """`kubectl` shows the job's own StatefulSet by that name."""
    owner = {"kind": "StatefulSet", "name": "job-a", "uid": "earlier", "controller": True}
    pod = {"metadata": {"name": "job-a-0", "ownerReferences": [owner]}}
    assert "Pod job-a-0 already exists and belongs to another StatefulSet job-a than the job's" in describe_foreign(
        "Pod", pod
    )
    other = {"metadata": {"name": "job-a-0", "ownerReferences": [owner | {"kind": "Job", "name": "job"}]}}
    assert "belongs to Job job:" in describe_foreign("Pod", other)
