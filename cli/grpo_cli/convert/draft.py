"""A job's spec in the making: fields by path, why each has its value, and what became of the options. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_cli.convert.fields import default
from grpo_cli.convert.rows import Finding, Kind
from grpo_cli.documents.yaml_values import Dumper, write_yaml

# fmt: off
_ORDER = ("device", "model", "dataset", "tools", "environments", "rewards", "training", "evaluation", "lora",
    "parallelism", "generation", "trainer", "storage", "podTemplate")
# fmt: on


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

    def value(self, path: str) -> Any:
        """Return the value of the field `path`, which is the spec's default where none was given."""
        return self.fields.get(path, default(path))

    def left(self, name: str, value: object, note: str, to: str) -> None:
        """Report what the options leave undecided; `note` says why, and what to do."""
        self.find(Kind.LEFT, name, value, note, to)

    def find(self, kind: Kind, name: str, value: object, note: str, to: str) -> None:
        """Add a finding that is about more than one option, or about none."""
        self.findings.append(Finding(name=name, value=str(value), kind=kind, to=to, note=note))

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


class _Dumper(Dumper):
    """Objects over several lines; lists indented; lists of values, and objects in lists, on one line each."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def list_node(self, data: list[Any]) -> yaml.SequenceNode:
        node = self.represent_list(data)
        node.flow_style = not all(isinstance(one, dict) for one in data)
        for one in node.value:
            one.flow_style = True
        return node


_Dumper.add_representer(list, _Dumper.list_node)


def files_to_yaml(name: str, files: dict[str, str]) -> str:
    """Return a ConfigMap of texts as YAML, in which they can be read and changed."""
    metadata = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    text: str = write_yaml([metadata]) + "data:\n"
    for file, content in files.items():
        text += f"  {file}: |\n" + "".join(f"    {line}\n" if line else "\n" for line in content.split("\n")[:-1])
    return text


def to_yaml(document: dict[str, Any], comments: dict[str, str]) -> str:
    """Return `document` as YAML; each comment, by the path of its field, ends that field's line."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    root, ends = yaml.compose(text, yaml.SafeLoader), {}
    for path, comment in comments.items():
        value: Any = root
        for name in path.split("."):
            key, value = next(pair for pair in value.value if pair[0].value == name)
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        ends[text.index("\n", (key.start_mark if is_block else value.end_mark).index)] = comment
    for end, comment in sorted(ends.items(), reverse=True):
        text = f"{text[:end]}  # {comment}{text[end:]}"
    return text
