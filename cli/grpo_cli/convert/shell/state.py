"""Variables of a script that is evaluated, and marks for values that are not known."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field

from grpo_cli.convert.shell.tree import Node, RefusedError

Value = str | list[str]
_MARK = re.compile("\ue000(\\d+)\ue001")
_MAX_CHARS = 200_000  # of a variable: a loop may double one


@dataclass(frozen=True, slots=True)
class Mark:
    """A value that the script does not say."""

    line: int
    text: str  # as the script writes it
    why: str
    is_unset: bool  # a variable that nothing sets: conditions see an empty one, as bash would

    @property
    def name(self) -> str:
        """The variable that is not set."""
        return re.sub(r"^\W*(\w+).*$", r"\1", self.text, flags=re.DOTALL)


@dataclass(slots=True)
class State:
    """Variables and arguments, of which each subshell has its own copy."""

    variables: dict[str, Value]
    exported: set[str] = field(default_factory=set)
    arguments: list[str] = field(default_factory=list)
    sourced: str = ""  # why a variable that the script does not set may be set nevertheless


def is_known(value: Value) -> bool:
    """Whether no part of `value` is a mark."""
    return not _MARK.search(value if isinstance(value, str) else "".join(value))


def is_mark(word: str) -> bool:
    """Whether nothing of `word` is known."""
    return bool(_MARK.fullmatch(word))


def matches(text: str | None, pattern: str | None) -> bool | None:
    """Whether a pattern of `Words.pattern` matches; None if that is not known."""
    if text is None or pattern is None or "[:" in pattern:
        return None
    return fnmatch.fnmatchcase(text, pattern)


class Knowledge:
    """Variables, and marks, in the present state."""

    def __init__(self, source: bytes, given: dict[str, str]) -> None:
        self._source, self._given = source, given
        self.state = State({"HOME": "~", **given})
        self.marks: list[Mark] = []
        self.used: set[str] = set()  # variables that were given, and read before the script set them
        self.asked: set[str] = set()  # variables that nothing sets, and on which a condition depended
        self._assigned: set[str] = set()

    def text(self, node: Node) -> str:
        """Return a node as the script writes it."""
        return self._source[node["Pos"]["Offset"] : node["End"]["Offset"]].decode()

    def line(self, node: Node) -> int:
        """Return the line where a node begins."""
        return int(node["Pos"]["Line"])

    def mark(self, node: Node, why: str, *, is_unset: bool = False) -> str:
        """Return a mark for the value of `node`."""
        return self.mark_line(self.line(node), self.text(node), why, is_unset=is_unset)

    def mark_line(self, line: int, text: str, why: str, *, is_unset: bool = False) -> str:
        """Return a mark for what `text` stands for."""
        self.marks.append(Mark(line, text, why, is_unset))
        return f"\ue000{len(self.marks) - 1}\ue001"

    def marks_in(self, value: Value) -> list[Mark]:
        """Return the marks of a value, in order."""
        return [
            self.marks[int(found[1])] for found in _MARK.finditer(value if isinstance(value, str) else " ".join(value))
        ]

    def unsure(self, words: list[str]) -> list[str]:
        """Return words of a list: one that nothing sets may be an empty word, or none."""
        marks = [self.marks_in(word)[0] if is_mark(word) else None for word in words]
        return [
            self.mark_line(mark.line, mark.text, mark.why) if mark else word
            for word, mark in zip(words, marks, strict=True)
        ]

    def shown(self, text: str) -> str:
        """Return `text` as the script writes it, for people."""
        return _MARK.sub(lambda found: self.marks[int(found[1])].text, text)

    def plain(self, text: str) -> str | None:
        """Return `text` for a condition; None if it is not known."""
        self.asked |= {mark.name for mark in self.marks_in(text) if mark.is_unset}
        text = _MARK.sub(lambda found: "" if self.marks[int(found[1])].is_unset else found[0], text)
        return text if is_known(text) else None

    def put(self, name: str, value: Value) -> None:
        """Set a variable; one that was given keeps that value where the script says none."""
        if name == "IFS":
            raise RefusedError("a script that sets IFS for all that follows is not read")
        if len(value if isinstance(value, str) else "".join(value)) > _MAX_CHARS:
            raise RefusedError(f"the variable {name} grows without end")
        if name in self._given and not is_known(value):
            self.used.add(name)
            value = self._given[name]
        else:
            self._assigned.add(name)
        self.state.variables[name] = value

    def variable(self, name: str) -> Value | None:
        """Return a variable; None if nothing sets it."""
        if name in self._given and name not in self._assigned:
            self.used.add(name)
        return self.state.variables.get(name)
