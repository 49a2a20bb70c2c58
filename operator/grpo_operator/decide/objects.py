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


def owner_of(child: Object) -> str:
    """Return the UID of an object's job by its label, "" if it has none."""
    return text(labels_of(child).get(names.LABEL_JOB_UID))


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
