"""An object that never changes is created only where its name is free, and one that the job has already is kept."""

import copy
from typing import Any

import pytest

from grpo_operator.edge.cluster import Cluster
from grpo_operator.edge.errors import ForeignError
from support.control_plane.memory_api import MemoryApi
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
    api = MemoryApi(Store())
    cluster = Cluster(api)  # type: ignore[arg-type]
    first = await cluster.create(copy.deepcopy(CONTRACT))
    assert [(one.verb, one.kind) for one in api.requests] == [("create", "ConfigMap")]
    again = await cluster.create(CONTRACT | {"data": {"contract.json": "of another release"}})
    assert again == first
    assert (again["kind"], again["data"]) == ("ConfigMap", CONTRACT["data"])


@pytest.mark.parametrize("owners", [[], [OURS | {"uid": "2"}]], ids=["nobody's", "an earlier job's"])
async def test_that_of_another_owner_is_left_alone(owners: list[dict[str, Any]]) -> None:
    api = MemoryApi(Store())
    theirs = copy.deepcopy(CONTRACT)
    theirs["metadata"]["ownerReferences"] = owners
    kept = copy.deepcopy(api.store.put(theirs))
    with pytest.raises(ForeignError, match=r"ConfigMap job-0 already exists and .*: it is not adopted"):
        await Cluster(api).create(CONTRACT)  # type: ignore[arg-type]
    assert api.store.get("ConfigMap", "ns", "job-0") == kept
