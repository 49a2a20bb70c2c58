"""Generate the CRD, docs/fields.md and docs/defaults.txt: `python -m grpo_operator.api.crd [--check]`.

The schema is structural (OpenAPI v3 as apiextensions/v1 requires): references are inlined, null is removed (an unset
field is absent), exclusive bounds are booleans, free-form objects are marked as such. Pages show every default; the CRD
itself has none for the spec (user_schema.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from grpo_operator.api import names, reference_page
from grpo_operator.api.job_rules import NAME_RULES, change_rules
from grpo_operator.api.root_rules import RULES, skipped_by_the_status
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.user_schema import without_defaults

Schema = dict[str, Any]

_ROOT = Path(__file__).parents[3]
TARGETS = (
    _ROOT / "crds" / "grpojobs.training.grpo.dev.yaml",
    _ROOT / "charts" / "grpo-operator" / "files" / "grpojobs.training.grpo.dev.yaml",
)
FIELDS_PAGE = _ROOT / "docs" / "fields.md"
DEFAULTS_PAGE = _ROOT / "docs" / "defaults.txt"

_ATOMIC = (
    *("model", "dataset", "training", "evaluation", "lora", "storage", "device", "rendezvous"),
    *("parallelism", "network", "cache"),
)
"""Sections of the spec that server-side apply takes as a whole: one manager owns all fields of such a section, and what
the API server keeps about owners has one entry for it. It reads, compares and writes these entries at each write of the
job; with one for each of 150 fields that was a third of the work."""
_ATOMICALLY = {"x-kubernetes-map-type": "atomic"}

_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.summary.step", 0),
    ("Reward", "string", ".status.summary.reward", 0),
    ("Trainer", "string", ".status.summary.trainer", 0),
    ("Generation", "string", ".status.summary.generation", 0),
    ("Restarts", "integer", ".status.restarts.total", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Environments", "string", ".status.summary.environments", 1),
    ("Best", "string", ".status.summary.best", 1),
    ("Reason", "string", ".status.summary.reason", 1),
    ("Message", "string", ".status.summary.message", 1),
)


def structural(model: type[GRPOJobSpec] | type[GRPOJobStatus]) -> Schema:
    """Return the structural schema of a model."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    definitions = schema.pop("$defs", {})
    result = _convert(schema, definitions)
    assert isinstance(result, dict)
    return result


def _convert(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = dict(node)
    # Only looked up here, and converted once: what is converted no longer says which sections are a choice.
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            target = definitions[node.pop("$ref").removeprefix("#/$defs/")]
        else:
            target, *others = [option for option in node.pop("anyOf") if option.get("type") != "null"]
            assert not others, f"a union that a CRD cannot express: {[target, *others]}"
        node = {**target, **node}
    out: Schema = {}
    for key, value in node.items():
        match key:
            case "title" | "propertyNames" | "additionalProperties" | "properties" | "items" | "const":
                continue
            # A list that is empty by default stays unset: merging distinguishes an empty list from none.
            case "default" if value is None or value == []:
                continue
            case "exclusiveMinimum" | "exclusiveMaximum" if not isinstance(value, bool):
                out[key.replace("exclusiveM", "m")] = value
                out[key] = True
            case _:
                out[key] = value
    if "const" in node:
        out["enum"] = [node["const"]]
    if out.get("type") == "integer":
        out["format"] = "int64"
    if "properties" in node:
        out["properties"] = {
            name: _property(name, child, node, definitions) for name, child in node["properties"].items()
        }
    elif out.get("type") == "object":
        values = (
            _convert(node["additionalProperties"], definitions)
            if isinstance(node.get("additionalProperties"), dict)
            else {}
        )
        if "type" in values:
            out["additionalProperties"] = values
        else:
            out["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        out["items"] = _convert(node["items"], definitions)
    return out


def _property(name: str, child: Schema, parent: Schema, definitions: dict[str, Schema]) -> Schema:
    schema = _convert(child, definitions)
    optional_object = schema.get("type") == "object" and "properties" in schema and "required" not in schema
    is_choice = "anyOf" in child
    if optional_object and not is_choice and name not in parent.get("required", []) and "default" not in schema:
        default = {key: value["default"] for key, value in schema["properties"].items() if "default" in value}
        if default:
            schema["default"] = default
    return schema


def whole_schema() -> Schema:
    """Return the schema of a GRPOJob, in which the rules of each section are where the section is."""
    spec, status = structural(GRPOJobSpec), structural(GRPOJobStatus)
    return {
        "type": "object",
        "description": "GRPOJob trains a language model with GRPO: one job with the roles trainer and generation.",
        "required": ["spec"],
        "properties": {
            # The API server describes these itself, and refuses a schema with more details of metadata.
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            # Until the operator has seen a job, its status says so: without it, kstatus takes a new job for done.
            "status": _without_defaults(status) | {"default": {"observedGeneration": 0}, **_ATOMICALLY},
        },
        RULES: [*NAME_RULES, *change_rules(spec)],
    }


def crd() -> Schema:
    """Return the whole CustomResourceDefinition."""
    schema = whole_schema()
    schema["properties"]["spec"] = without_defaults(schema["properties"]["spec"])
    schema[RULES] = skipped_by_the_status(schema, NAME_RULES, change_rules(schema["properties"]["spec"]))
    for section in _ATOMIC:
        schema["properties"]["spec"]["properties"][section] |= _ATOMICALLY
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.generation.server.elastic.replicas",
                "statusReplicasPath": ".status.elastic.replicas",
                "labelSelectorPath": ".status.elastic.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in _COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": "grpojob",
                "shortNames": ["grpo"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def _without_defaults(node: Any) -> Any:
    """Remove all defaults: the operator writes the whole status; a default would be a state that nobody observed."""
    if isinstance(node, dict):
        return {key: _without_defaults(value) for key, value in node.items() if key != "default"}
    return [_without_defaults(item) for item in node] if isinstance(node, list) else node


def render() -> str:
    """Return the CRD as YAML."""
    header = "# Generated by `make crds` from operator/grpo_operator/api/spec.py. Do not edit.\n"
    return header + yaml.safe_dump(crd(), sort_keys=False, width=120)


def default_lines(section: Schema, path: str = "") -> Iterator[str]:
    """Yield `path: default` for each field of a section that has a default, as JSON."""
    for name, field in section["properties"].items():
        if not isinstance(default := field.get("default", {}), dict):
            yield f"{path}{name}: {json.dumps(default)}"
        inner, mark = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" in inner:
            yield from default_lines(inner, f"{path}{name}{mark}.")


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when a file differs from the models.")
def main(check: bool) -> None:
    """Write the CRD to crds/ and the chart, and its fields and their defaults to docs/."""
    text = render()
    schema = whole_schema()
    texts = {path: text for path in TARGETS} | {
        FIELDS_PAGE: reference_page.render(schema),
        DEFAULTS_PAGE: "".join(f"{line}\n" for line in default_lines(schema["properties"]["spec"])),
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        sys.exit(
            f"differs from the models: {', '.join(str(path.relative_to(_ROOT)) for path in stale)}; run `make crds`"
        )
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])


if __name__ == "__main__":
    main()
