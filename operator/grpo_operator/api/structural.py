"""Definitions of custom resources, and structural schemas of models (OpenAPI v3, as apiextensions/v1 requires). Pure.

References are inlined, null is removed (an unset field is absent), exclusive bounds are booleans, free-form objects are
marked as such.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from grpo_operator.api import names

Schema = dict[str, Any]


def structural(model: type[BaseModel]) -> Schema:
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


def remove_defaults(node: Any) -> Any:
    """Remove all defaults: the operator writes the whole status; a default would be a state that nobody observed."""
    if isinstance(node, dict):
        return {key: remove_defaults(value) for key, value in node.items() if key != "default"}
    return [remove_defaults(item) for item in node] if isinstance(node, list) else node


def definition(
    scope: str,
    words: Schema,
    schema: Schema,
    columns: Iterable[tuple[str, str, str, int]],
    scale: Schema | None = None,
) -> Schema:
    """Return the CustomResourceDefinition of a kind of our group, with a status.

    `words`: its names, `columns`: name, type, path and priority of each that kubectl prints, `scale`: the paths of the
    subresource of that name.
    """
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, **({"scale": scale} if scale else {})},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in columns
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{words['plural']}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": scope,
            "names": {"kind": words["kind"], "listKind": f"{words['kind']}List", **words},
            "versions": [version],
        },
    }
