"""YAML as kubectl reads it: by the rules of sigs.k8s.io/yaml, which are neither those of PyYAML nor of YAML 1.2. Pure.

`2e-5` is a number, `yes` and `on` are true, `0o17` and `017` are 15, `1:30` and dates are texts, the last of two equal
keys counts, and a merge (`<<`) counts where it stands.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any, ClassVar

import yaml

_PLAIN = "plain"
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_UNDERSCORES = re.compile(r"[-+0-9]|\.[0-9]+(_[0-9]+)*([eE][-+]?[0-9]+(_[0-9]+)*)?$")
"""Texts whose underscores count for nothing if they are numbers."""
_INTEGERS = (
    (re.compile(r"[-+]?0[xX][0-9a-fA-F]+"), 16),
    (re.compile(r"[-+]?0[oO][0-7]+"), 8),
    (re.compile(r"[-+]?0[bB][01]+"), 2),
    (re.compile(r"[-+]?0[0-7]*"), 8),
    (re.compile(r"[-+]?[1-9][0-9]*"), 10),
)
_WORDS: dict[str, Any] = {
    **{form: True for word in ("y", "yes", "true", "on") for form in (word, word.capitalize(), word.upper())},
    **{form: False for word in ("n", "no", "false", "off") for form in (word, word.capitalize(), word.upper())},
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **{f"{sign}{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_KINDS: dict[str, type | tuple[type, ...]] = {"bool": bool, "int": int, "float": (int, float), "null": type(None)}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # kubectl's is a libyaml, too
    """Composes nodes; a plain scalar without a tag has the tag _PLAIN."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _MERGE if value == "<<" else _PLAIN
        return super().resolve(kind, value, implicit)


class Dumper(yaml.SafeDumper):
    """Writes what `read_yaml` reads: PyYAML leaves texts such as `y` and `1e3` without quotes."""

    def text_node(self, text: str) -> yaml.ScalarNode:
        """Return a text as a node."""
        node = self.represent_str(text)
        if not isinstance(scalar(text), str):
            node.style = "'"
        return node


Dumper.add_representer(str, Dumper.text_node)


def write_yaml(documents: Iterable[Any]) -> str:
    """Return documents as `read_yaml`, and kubectl, read them."""
    text: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False)
    return text


def read_yaml(text: str) -> list[Any]:
    """Return the documents of a stream; those that are empty are None. Raises ValueError with the line.

    A stream of JSON is read as such: its escapes of emoji are none of YAML.
    """
    if text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):  # of YAML that begins as JSON does
            return [*_read_json(text.strip())]
    found = []
    for first, document in _split(text):
        try:
            nodes = list(yaml.compose_all(document, _Loader))
            if len(nodes) > 1:
                raise ValueError(f"line {first}: begin each document with a line ---")
            found += [_value(node, ()) for node in nodes]
        except yaml.MarkedYAMLError as error:
            line = first + (error.problem_mark.line if error.problem_mark else 0)
            raise ValueError(f"line {line}: {error.problem or error.context}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"in the document of line {first}: {' '.join(str(error).split())}") from error
        except _TagError as error:
            raise ValueError(f"line {first + error.node.start_mark.line}: {error}") from error
    return found


def scalar(text: str) -> Any:
    """Return the value of a text without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    digits = text.replace("_", "") if _UNDERSCORES.match(text) else text
    for pattern, base in _INTEGERS:
        if pattern.fullmatch(digits):
            number = int(digits.replace("o", "").replace("O", ""), base) if base == 8 else int(digits, base)
            if -(2**63) <= number < 2**64:
                return number
    if _FLOAT.fullmatch(digits) and abs(real := float(digits)) != float("inf"):
        return real
    return text


def _read_json(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_constant=_refuse)
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


class _TagError(Exception):
    def __init__(self, node: yaml.Node, message: str) -> None:
        super().__init__(message)
        self.node = node


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield documents, each with the number of its first line."""
    lines = list(enumerate(text.split("\n"), 1))
    for is_mark, group in groupby(lines, lambda line: line[1].startswith("---")):
        found = list(group)
        if not is_mark:
            yield found[0][0], "\n".join(line for _, line in found)
            continue
        for number, line in found:
            if (rest := line[3:].strip()) and not rest.startswith("#"):
                raise ValueError(f"line {number}: begin a document below the line ---, not in it (found {rest})")


def _value(node: yaml.Node, above: tuple[yaml.Node, ...]) -> Any:
    if node in above:
        raise _TagError(node, "an anchor contains itself")
    match node:
        case yaml.ScalarNode():
            return _scalar(node)
        case yaml.SequenceNode():
            return [_value(one, (*above, node)) for one in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            for one in reversed(value.value) if isinstance(value, yaml.SequenceNode) else (value,):
                if not isinstance(one, yaml.MappingNode):
                    raise _TagError(one, "<< takes a mapping, or a list of them")
                found |= _value(one, (*above, node))
        else:
            found[_key(key)] = _value(value, (*above, node))
    return found


def _scalar(node: yaml.ScalarNode) -> Any:
    if node.tag == _PLAIN:
        return scalar(node.value)
    kind = node.tag.removeprefix(_TAG)
    if kind in _KINDS:
        value = scalar(node.value)
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise _TagError(node, f"{node.value} is no !!{kind}")
        return value
    if kind == "binary":
        try:
            return base64.b64decode("".join(node.value.split()), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise _TagError(node, f"!!binary is no text in base64: {error}") from error
    return node.value


def _key(node: yaml.Node) -> str:
    match _scalar(node) if isinstance(node, yaml.ScalarNode) else node:
        case str() as key:
            return key
        case bool() as key:
            return "true" if key else "false"
        case int() as key:
            return str(key)
        case float() as key if abs(key) < float("inf"):
            return str(int(key)) if key.is_integer() and abs(key) < 1e21 else f"{key!r}"
    raise _TagError(node, "a key must be a text; write it in quotes")
