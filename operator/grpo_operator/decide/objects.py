"""Read what Kubernetes objects of any kind have, as the API server returns them: labels, owners, conditions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_operator.api import names
from grpo_spec.lenient import mapping, mappings, text

Object = Mapping[str, Any]


def labels_of(child: Object) -> Object:
    """Return an object's labels, empty if it has none."""
    return mapping(child["metadata"].get("labels"))


def controller_of(child: Object) -> Object:
    """Return the owner reference of an object's controller, empty if it has none."""
    return next((ref for ref in mappings(child["metadata"].get("ownerReferences")) if ref.get("controller")), {})


def owner_of(child: Object, name: str | None = None) -> str:
    """Return the UID of the job that owns an object other than a pod, "" if no job of this name does.

    Labels select objects, and anybody may copy them; only the controller among the owner references says whose one is.
    `name`: by default the name in the object's label, which others may have changed.
    """
    owner = controller_of(child)
    name = labels_of(child).get(names.LABEL_JOB) if name is None else name
    return text(owner.get("uid")) if (owner.get("kind"), owner.get("name")) == (names.KIND, name) else ""


def labelled_job(pod: Object) -> str:
    """Return the UID of a job that a pod's label names, "" if it has none. `observe` says whether it owns the pod."""
    return text(labels_of(pod).get(names.LABEL_JOB_UID))


def finalizers_of(child: Object) -> str:
    """Name the finalizers of an object, "" if it has none."""
    found = child["metadata"].get("finalizers")
    return ", ".join(map(str, found)) if isinstance(found, list) else ""


def condition(status: Object, kind: str) -> Object:
    """Return the condition of a type in an object's status, empty if there is none."""
    return next((c for c in mappings(status.get("conditions")) if c.get("type") == kind), {})


def fields_of_ours(child: Object) -> list[tuple[int, Object]]:
    """Return those entries of an object's managedFields that say which fields the operator set, after their places."""
    entries = enumerate(mappings(child["metadata"].get("managedFields")))
    return [
        (at, entry) for at, entry in entries if entry.get("manager") == names.MANAGER and "subresource" not in entry
    ]


def was_applied(child: Object) -> bool:
    """Whether no field of an object is the operator's only because it created the object."""
    entries = [entry for _, entry in fields_of_ours(child)]
    return not entries or any(entry.get("operation") == "Apply" for entry in entries)
