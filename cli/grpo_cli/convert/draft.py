"""A job's spec in the making: fields by path, why each has its value, and what became of the options. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_cli.convert.rows import Finding, Kind


@dataclass(slots=True)
class Draft:
    """Fields of the spec, facts that more than one option speaks about, and findings."""

    fields: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def set(self, path: str, value: Any, why: str = "") -> None:
        """Give the field `path` a value; `why` becomes its comment."""
        self.fields[path] = value
        if why:
            self.comments[path] = why

    def tell(self, kind: Kind, name: str, value: object, note: str, to: str = "") -> None:
        """A finding about what several options say together, or what none says."""
        self.findings.append(Finding(source="together", name=name, value=str(value), kind=kind, to=to, note=note))

    def drop(self, section: str) -> None:
        """Leave out a section."""
        for path in [path for path in self.fields if path == section or path.startswith(f"{section}.")]:
            del self.fields[path]
            self.comments.pop(path, None)

    def spec(self) -> dict[str, Any]:
        """The fields as nested objects, in the order in which the API lists its sections."""
        nested: dict[str, Any] = {}
        for path, value in sorted(self.fields.items(), key=lambda item: _ORDER.index(item[0].split(".")[0])):
            *parents, last = path.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return nested


_ORDER = [
    "device",
    "model",
    "dataset",
    "rewards",
    "training",
    "lora",
    "parallelism",
    "generation",
    "trainer",
    "storage",
    "podTemplate",
]


def lines(node: Any, comments: dict[str, str], path: str = "", indent: int = 0) -> Iterator[str]:
    """`node` (nested dicts of scalars and lists) as YAML's lines, comments behind their fields."""
    for key, value in node.items():
        here = f"{path}.{key}" if path else key
        pad = "  " * indent
        comment = f"  # {comments[here]}" if here in comments else ""
        if isinstance(value, dict) and value:
            yield f"{pad}{key}:{comment}"
            yield from lines(value, comments, here, indent + 1)
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            yield f"{pad}{key}:{comment}"
            yield from (f"{pad}  - {flow(one)}" for one in value)
        else:
            yield f"{pad}{key}: {flow(value)}{comment}"


def flow(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
