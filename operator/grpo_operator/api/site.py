"""Defaults of a site for its jobs: GRPOClusterDefaults for all of them, GRPODefaults for those of a namespace. Pure.

Each has two blocks that are parts of a GRPOJob's spec: `defaults`, under what a job sets, and `enforced`, which no job
may set otherwise. The layers of a job are those of both objects, in the form in which its status keeps them. Everything
is decided on leaves: values by their path. In a list of podTemplate, each item is a leaf, by its merge key.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.pod_template import MERGE_KEYS, PodTemplate
from grpo_spec.lenient import mapping, mappings

QUEUE = "queue"
"""Stands for the job's label: no section of a spec says in which queue the job waits."""
PRICE = "gpuHourPrice"
"""Price of a GPU for an hour, an amount and a currency: no part of a spec either."""
PRICE_FORM = r"^\d{1,9}(\.\d{1,4})? \S{1,8}$"

SECTIONS = (
    *("image", "imagePullPolicy", "device", "network", "scheduling", "cache"),
    *("commonLabels", "commonAnnotations", "podTemplate"),
)
"""Sections of the spec that say where a job runs, not what it computes."""

DEFAULTS, ENFORCED = BLOCKS = ("defaults", "enforced")

REQUIRED: dict[str, Any] = {
    "model": {"name": "unknown"},
    "dataset": {"name": "unknown"},
    "rewards": [{"name": "unknown", "accuracy": {}}],
    "trainer": {"groups": [{"name": "unknown", "gpus": 1}]},
}
"""Stands in for the fields without a default, in a spec that is never built."""

Layers = Mapping[str, Any]
"""By kind: {"generation": 1, "defaults": {...}, "enforced": {...}}. What is read from a status may have any form."""

_Leaves = dict[tuple[str, ...], Any]
_LISTS = {field.alias for field in PodTemplate.model_fields.values() if field.default == ()}


@dataclass(frozen=True, slots=True)
class Origin:
    """A value of a job that its user did not write: its field, and the object that it is from."""

    field: str
    value: Any
    kind: str
    enforced: bool


def merged(spec: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """Return a job's spec with the values of its layers: its own win over defaults, enforced ones over all.

    Maps are merged, also inside each other, and lists of podTemplate by their items.
    """
    below, above = _of_all(layers, DEFAULTS), _of_all(layers, ENFORCED)
    # A default for pods' own labels, which a namespace that enforces common ones cannot see, would hide these.
    above |= {path: value for path, value in _of_pods_too(above).items() if path in below}
    out = {**spec}
    for section in SECTIONS:
        if any(path[0] == section for path in (*below, *above)):
            leaves = below | _leaves({section: spec.get(section)}) | above
            out[section] = _built({path: value for path, value in leaves.items() if path[0] == section})[section]
    return _in_groups(out, below | above)


def _in_groups(spec: dict[str, Any], given: _Leaves) -> dict[str, Any]:
    """Add what layers give to lists of groups that would replace the job's list: such as have no merge key."""
    lists = {path: one for path, one in given.items() if _is_item(path) and path[1] not in MERGE_KEYS}
    if not lists:
        return spec
    spec = copy.deepcopy(spec)
    for _, template in _group_templates(spec):
        for name in {path[1] for path in lists} & template.keys():
            added = {path: one for path, one in lists.items() if path[1] == name}
            own = _leaves({"podTemplate": {name: template[name]}})
            template[name] = _built(added | own)["podTemplate"][name]
    return spec


def queue_of(label: str, layers: Layers) -> str:
    """Return the queue of a job that names this one, or none ("")."""
    enforced, given = (_of_all(layers, block).get((QUEUE,), "") for block in (ENFORCED, DEFAULTS))
    return str(enforced or label or given)


def price_of(layers: Layers) -> tuple[float, str] | None:
    """Return what a GPU hour of a job costs, and the currency; None if its site does not say."""
    given = (_of_all(layers, DEFAULTS) | _of_all(layers, ENFORCED)).get((PRICE,))
    if given is None or not re.fullmatch(PRICE_FORM, str(given)):
        return None
    amount, _, currency = str(given).partition(" ")
    return float(amount), currency


def find_refusal(spec: Mapping[str, Any], label: str, layers: Layers) -> str | None:
    """Return why a job may not begin with these layers, or None: the field, and the object that forbids its value.

    `label`: the queue that the job names, or "".
    """
    wrong = [
        f"{kind} {names.DEFAULTS_NAME} is not valid, so no job begins: {one['fault']}"
        for kind, one in layers.items()
        if mapping(one).get("fault")
    ]
    checked: dict[str, Mapping[str, Any]] = {
        "spec": {**{name: spec.get(name) for name in SECTIONS}, QUEUE: label or None}
    }
    groups = {root: {"podTemplate": template} for root, template in _group_templates(spec)}
    checked |= groups
    for kind in reversed(names.DEFAULTS_KINDS):
        enforced = _of_pods_too(_leaves(_block(layers, kind, ENFORCED)))
        for root, values in checked.items():
            own = _leaves(values, nulls=root in groups)
            for path, value in enforced.items():
                # What is set above a value, where it has no map, hides it.
                if any(own.get(path[:n], value) != value for n in range(1, len(path) + 1)):
                    said = f"{kind} {names.DEFAULTS_NAME} enforces {_shown(value)}; set this, or leave it out"
                    wrong.append(f"{_field(path, root)}: {said}")
        # What a namespace sets is below what the cluster does.
        checked |= {f"{kind} {names.DEFAULTS_NAME}, spec.{block}": _block(layers, kind, block) for block in BLOCKS}
    return "; ".join(wrong) or None


def describe(layers: Layers) -> str:
    """Name the objects."""
    return " and ".join(f"{kind} {names.DEFAULTS_NAME}" for kind in names.DEFAULTS_KINDS if kind in layers)


def origins(spec: Mapping[str, Any], label: str, layers: Layers) -> list[Origin]:
    """Return the values that a job has from its layers, in the order of the spec's sections."""
    own = _leaves({**{name: spec.get(name) for name in SECTIONS}, QUEUE: label or None})
    found: dict[tuple[str, ...], Origin] = {}
    for block in (DEFAULTS, ENFORCED):
        for kind in names.DEFAULTS_KINDS if block == DEFAULTS else reversed(names.DEFAULTS_KINDS):
            for path, value in _leaves(_block(layers, kind, block)).items():
                if block == ENFORCED or path not in own:
                    found[path] = Origin(_field(path, "spec"), value, kind, block == ENFORCED)
    order = (QUEUE, PRICE, *SECTIONS)
    return [found[path] for path in sorted(found, key=lambda path: order.index(path[0]))]


def _block(layers: Layers, kind: str, block: str) -> Mapping[str, Any]:
    return mapping(mapping(layers.get(kind)).get(block))


def _of_all(layers: Layers, block: str) -> _Leaves:
    """Return what a block of all layers sets: a namespace's defaults win, and the cluster's enforced values."""
    kinds = names.DEFAULTS_KINDS if block == DEFAULTS else reversed(names.DEFAULTS_KINDS)
    return {path: value for kind in kinds for path, value in _leaves(_block(layers, kind, block)).items()}


def _of_pods_too(enforced: _Leaves) -> _Leaves:
    """Add that pods, whose own labels and annotations win over common ones, have those that are enforced."""
    own = {"commonLabels": "labels", "commonAnnotations": "annotations"}
    return {
        ("podTemplate", own[path[0]], *path[1:]): value for path, value in enforced.items() if path[0] in own
    } | enforced


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = (), *, nulls: bool = False) -> _Leaves:
    """Return values that are set by their paths. `nulls`: also those that are null, which in a group remove a value."""
    found: _Leaves = {}
    for name, value in values.items():
        path = (*above, name)
        if isinstance(value, Mapping):
            found |= _leaves(value, path, nulls=nulls)
        elif isinstance(value, list | tuple) and path[:-1] == ("podTemplate",) and name in _LISTS:
            found |= {(*path, _key(name, item)): item for item in value}
        elif value is not None or nulls:
            found[path] = value
    return found


def _key(name: str, item: Any) -> str:
    key = mapping(item).get(MERGE_KEYS.get(name, ""))
    return key if isinstance(key, str) else json.dumps(item, sort_keys=True)


def _is_item(path: tuple[str, ...]) -> bool:
    return path[0] == "podTemplate" and path[1] in _LISTS


def _built(leaves: _Leaves) -> dict[str, Any]:
    """Return the values of which these are the leaves."""
    out: dict[str, Any] = {}
    for path, value in leaves.items():
        at, steps = out, path[:2] if _is_item(path) else path
        for name in steps[:-1]:
            if not isinstance(at.get(name), dict):  # a leaf below a leaf: one of the two has the wrong form
                at[name] = {}
            at = at[name]
        if _is_item(path):
            at.setdefault(steps[-1], []).append(value)
        else:
            at[steps[-1]] = value
    return out


def _group_templates(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the podTemplate of each group that has one, after the group's path."""
    for role in ("trainer", "generation.server", "environmentPods"):
        section: Any = spec
        for name in role.split("."):
            section = mapping(mapping(section).get(name))
        for number, group in enumerate(mappings(section.get("groups"))):
            if isinstance(template := group.get("podTemplate"), Mapping):
                yield f"spec.{role}.groups[{number}]", template


def _field(path: tuple[str, ...], root: str) -> str:
    """Return a path as people write it; `root` is the object's, or the job's, part that it is below."""
    if path == (QUEUE,) and root == "spec":
        return f"metadata.labels[{names.LABEL_QUEUE}]"
    if path == (PRICE,) and root == "spec":
        return "price of a GPU hour"
    if _is_item(path) and path[1] not in MERGE_KEYS:
        path = path[:2]
    return root + "".join(f".{name}" if name.isalnum() else f"[{name}]" for name in path)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
