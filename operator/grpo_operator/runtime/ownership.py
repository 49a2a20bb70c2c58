"""Owners of children, and of their fields. Pure.

Children are created, which costs the API server half of what an apply costs, and are applied when they change. An apply
removes only what an earlier apply set. So the fields that the creation set are first noted as applied.
"""

from __future__ import annotations

from grpo_operator.api import names
from grpo_operator.decide.objects import Object, controller_of, fields_of_ours, finalizers_of, was_applied
from grpo_operator.runtime.errors import ForeignError, LeftoverError


def check_owner(manifest: Object, live: Object) -> None:
    """Raise ForeignError unless the object of the manifest's name has the manifest's owner; LeftoverError if its owner
    was an earlier job of the same name.
    """
    kind, (ours, *_) = manifest["kind"], manifest["metadata"]["ownerReferences"]
    owner = controller_of(live)
    if owner.get("uid") == ours["uid"]:
        return
    if (owner.get("kind"), owner.get("name")) == (ours["kind"], ours["name"]):
        held = finalizers_of(live)
        cure = f"it is gone once who set its finalizers removes them: {held}" if held else "there is nothing to do"
        said = f"{kind} {live['metadata']['name']} is of an earlier job of this name, and is deleted; {cure}"
        raise LeftoverError(said, "" if "deletionTimestamp" in live["metadata"] else live["metadata"]["uid"])
    raise ForeignError(describe_foreign(kind, live))


def describe_foreign(kind: str, live: Object) -> str:
    """Say whose an object is that has the name of a job's, and what to do."""
    owner = controller_of(live)
    name = live["metadata"]["name"]
    holder = f"belongs to {owner['kind']} {owner['name']}" if owner else "has no owner"
    if owner.get("kind") == "StatefulSet" and name.rpartition("-")[0] == owner["name"]:  # whose name is right
        holder = f"belongs to another StatefulSet {owner['name']} than the job's"
    cure = "it is not adopted; delete it, or give the job another name"
    return f"{kind} {name} already exists and {holder}: {cure}"


def noted_as_applied(live: Object) -> list[Object]:
    """Return the JSON patch that notes the fields which our creation and updates set as applied by us; empty if we have
    applied the object before.

    What kubectl does before it applies server-side what it applied otherwise (client-go's csaupgrade).
    """
    if was_applied(live):
        return []
    steps: list[Object] = [{"op": "test", "path": "/metadata/uid", "value": live["metadata"]["uid"]}]
    for place, _ in fields_of_ours(live):
        path = f"/metadata/managedFields/{place}"
        steps += (
            {"op": "test", "path": f"{path}/manager", "value": names.MANAGER},
            {"op": "replace", "path": f"{path}/operation", "value": "Apply"},
        )
    return steps
