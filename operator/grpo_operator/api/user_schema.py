"""The schema of a spec that stays as its user wrote it: no default is written into it.

An API server fills defaults in before it compares a spec with the older one. With those of a newer release, a manifest
that nobody has changed would differ from the job that was made of it, and be refused, or change the job. So the CRD has
none, and the operator fills in those with which a job began (defaults.py). Rules read an unset field as its default.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grpo_operator.api.root_rules import RULES

Schema = dict[str, Any]

_MACROS = r"(?:all|exists|exists_one|filter|map)"
_BINDING = re.compile(rf"(\w+(?:\.\w+)+)\.{_MACROS}\((\w+),")
_PATH = re.compile(r"(has\()?(?<![\w.?'])(\w+)((?:\.\w+)+)(\()?")
_KEPT = ("spec.generation.server.elastic.replicas",)
"""The subresource `scale` needs a number. No default of it will change: 1 is the least."""


def without_defaults(schema: Schema, path: str = "spec") -> Schema:
    """Return the schema of a section without defaults of values; a section that is always there stays so, as {}.

    Descriptions tell the defaults, and rules read an unset field as its default.
    """
    out = dict(schema)
    if RULES in out:
        out[RULES] = [
            {
                key: _read_defaults(text, schema) if key in ("rule", "messageExpression") else text
                for key, text in one.items()
            }
            for one in out[RULES]
        ]
    if isinstance(default := out.get("default"), dict):
        out["default"] = {}
    elif "default" in out and path not in _KEPT:
        del out["default"]
        if "efault: " not in out["description"]:  # else it says what the value means
            out["description"] = f"{out['description']} Default: {_shown(default)}."
    if "properties" in out:
        out["properties"] = {name: without_defaults(one, f"{path}.{name}") for name, one in out["properties"].items()}
    if "items" in out:
        out["items"] = without_defaults(out["items"], f"{path}[]")
    return out


def _shown(default: Any) -> str:
    return default if isinstance(default, str) else json.dumps(default)


def _read_defaults(expression: str, schema: Schema) -> str:
    """Return a rule of a section that reads each unset field as its default."""
    sections = {"self": schema}
    for path, variable in _BINDING.findall(expression):
        root, *names = path.split(".")
        if root in sections and (found := _at(sections[root], names)) is not None and "items" in found:
            sections[variable] = found["items"]

    def replaced(match: re.Match[str]) -> str:
        asks, root, path, calls = match[1] or "", match[2], match[3][1:], match[4] or ""
        names = path.split(".")
        method = [names.pop()] if calls else []
        if asks or root not in sections:
            return match[0]
        field = _at(sections[root], names)
        if field is None or isinstance(field.get("default", {}), dict):
            return match[0]
        it = ".".join([root, *names])
        # Not `.?` and orValue: of their result the API server does not know how long it may be.
        return ".".join([f"(has({it}) ? {it} : {json.dumps(field['default'])})", *method]) + calls

    return _PATH.sub(replaced, expression)


def _at(schema: Schema, names: list[str]) -> Schema | None:
    """Return the schema of a field below this one; None if there is none."""
    for name in names:
        found = schema.get("properties", {}).get(name.strip("_"))
        if found is None:
            return None
        schema = found
    return schema
