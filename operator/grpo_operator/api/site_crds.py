"""The CRDs of what a site sets: GRPOClusterDefaults and GRPODefaults (site.py). Pure.

Their sections have the types of a GRPOJob's, but none of its rules between fields: those are checked on jobs, which
have all values.
"""

from __future__ import annotations

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.root_rules import RULES
from grpo_operator.api.site import DEFAULTS, ENFORCED, PRICE, PRICE_FORM, QUEUE, SECTIONS
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.api.structural import Schema, definition, remove_defaults, structural

_BLOCKS = {
    DEFAULTS: "Parts of a GRPOJob's spec for jobs that do not set these fields.",
    ENFORCED: "Parts of a GRPOJob's spec that all jobs have: one that sets a field otherwise does not begin.",
}
_SCOPES = {
    "GRPOClusterDefaults": (
        "Cluster",
        "What a site sets for the jobs of all namespaces. Where both do, a GRPODefaults' defaults win.",
    ),
    "GRPODefaults": ("Namespaced", "What a site sets for the jobs of a namespace."),
}
_FROM_NOW_ON = "A change is for jobs that have not begun: the others keep what they began with, in status.site."
_COLUMNS = (
    ("Valid", "string", '.status.conditions[?(@.type=="Valid")].status', 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Message", "string", '.status.conditions[?(@.type=="Valid")].message', 1),
)
_CONDITION = {
    **{name: {"type": "string"} for name in ("type", "status", "reason", "message", "lastTransitionTime")},
    "observedGeneration": {"type": "integer", "format": "int64"},
}


def site_crds() -> list[Schema]:
    """Return the two CustomResourceDefinitions."""
    return [_crd(kind) for kind in names.DEFAULTS_KINDS]


def _crd(kind: str) -> Schema:
    scope, about = _SCOPES[kind]
    plural = names.plural(kind)
    schema = {
        "type": "object",
        "description": f"{about} {_FROM_NOW_ON}",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"type": "object", "properties": {block: _block(block) for block in _BLOCKS}},
            "status": {
                "type": "object",
                "properties": {
                    "conditions": {"type": "array", "items": {"type": "object", "properties": dict(_CONDITION)}}
                },
            },
        },
        RULES: [
            {
                "rule": f"self.metadata.name == '{names.DEFAULTS_NAME}'",
                "message": f"the name must be {names.DEFAULTS_NAME}: one {kind} counts",
            }
        ],
    }
    return definition(scope, {"kind": kind, "plural": plural, "singular": plural}, schema, _COLUMNS)


def _block(block: str) -> Schema:
    of_jobs = remove_defaults(structural(GRPOJobSpec))["properties"]
    queue = {
        "type": "string",
        "minLength": 1,
        "description": f"Kueue's LocalQueue: the label {names.LABEL_QUEUE} of a job.",
    }
    # One of the blocks describes the fields, for the other they would be the same words.
    removed = {RULES} if block == DEFAULTS else {RULES, "description"}
    price = {
        "type": "string",
        "pattern": PRICE_FORM,
        "description": "What a GPU costs for an hour, as in 2.50 EUR: `grpo status` says what jobs cost.",
    }
    parts = {QUEUE: queue, PRICE: price} | {name: _without(of_jobs[name], removed) for name in SECTIONS}
    return {"type": "object", "description": _BLOCKS[block], "properties": parts}


def _without(node: Any, removed: set[str]) -> Any:
    """Remove these keys, but not the rules of items: such a rule is about one item, and holds wherever that is."""
    if isinstance(node, dict):
        inner = {key: removed - {RULES} if key == "items" else removed for key in node}
        return {key: _without(value, inner[key]) for key, value in node.items() if key not in removed}
    return [_without(item, removed) for item in node] if isinstance(node, list) else node
