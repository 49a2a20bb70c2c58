"""Variables of a script that is evaluated, marks for values that are not known, and states of branches."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from grpo_cli.convert.shell.tree import Node, RefusedError

Value = str | list[str]
Run = Callable[[], bool | None]
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


def negated(status: bool | None, when: bool = True) -> bool | None:
    """Whether a status is False, `when` it is asked for so; None if it is not known."""
    return status if status is None or not when else not status


class Stop(Exception):  # noqa: N818 - no error: what ends a block early
    def __init__(self, line: int, status: bool | None = None, kind: str = "") -> None:
        self.line, self.status, self.kind = line, status, kind


class Exit(Stop):
    pass


class Return(Stop):
    pass


class Break(Stop):
    pass


class Knowledge:
    """Variables, and marks, in the present state; where only a run decides, all branches are followed."""

    def __init__(self, source: bytes, given: dict[str, str]) -> None:
        self._source, self._given = source, given
        self.state = State({"HOME": "~", **given})
        self.marks: list[Mark] = []
        self.used: set[str] = set()  # variables that were given, and read before the script set them
        self.asked: set[str] = set()  # variables that nothing sets, and on which a condition depended
        self._assigned: set[str] = set()
        self._early: list[tuple[Stop, State, int]] = []  # ends of blocks under conditions that are not known
        self._condition: int | None = None  # the line of the outermost of these conditions

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

    def shown(self, value: Any) -> Any:
        """Return a text, or texts, as the script writes them, for people."""
        if isinstance(value, list):
            return [self.shown(one) for one in value]
        return _MARK.sub(lambda found: self.marks[int(found[1])].text, value) if isinstance(value, str) else value

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

    def _apart(self, run: Run) -> bool | None:
        """A subshell: its variables go with it."""
        kept, self.state = self.state, copy.deepcopy(self.state)
        try:
            return run()
        except Exit:
            return None
        finally:
            self.state = kept

    def _fork(self, line: int, branches: Sequence[Callable[[], object]]) -> bool | None:
        """Run all branches of a condition; variables on which they differ are not known afterwards."""
        before, outer, first = self.state, self._condition, len(self._early)
        ends: list[State] = []
        stops: list[Stop] = []
        self._condition = outer or line
        for branch in branches:
            self.state = copy.deepcopy(before)
            try:
                branch()
                ends.append(self.state)
            except Stop as stop:  # after an exit there is nothing left to know
                stops.append(stop)
                if not isinstance(stop, Exit):
                    self._early.append((stop, self.state, line))
        self._condition = outer
        if ends:
            self.state = self._merged(ends, line)
            return None
        if len(self._early) > first:
            early, self.state, _ = self._early.pop()
            raise early
        self.state = before
        raise stops[0]

    def _merged(self, states: list[State], line: int) -> State:
        self.state, why = states[0], f"it depends on line {line}, which only a run decides"
        for name in sorted(set().union(*(state.variables for state in states))):
            values = [state.variables.get(name) for state in states]
            if all(value == values[0] for value in values):
                continue
            unknown = self.mark_line(line, f"${name}", why)
            lists = [value for value in values if isinstance(value, list)]
            if len(lists) == len(values):  # what all begin with is known
                shared = takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))
                self.put(name, [*(words[0] for words in shared), unknown])
            else:
                self.put(name, unknown)
        if any(state.arguments != states[0].arguments for state in states):
            self.state.arguments = [self.mark_line(line, "$@", why)]
        self.state.exported = set().union(*(state.exported for state in states))
        self.state.sourced = next((state.sourced for state in states if state.sourced), "")
        return self.state

    def _join(self, kind: type[Stop], since: int) -> bool:
        """Take into account that the block may have ended early, by a `return` or `break`; return whether it may."""
        ends = [entry for entry in self._early[since:] if isinstance(entry[0], kind)]
        for entry in ends:
            self._early.remove(entry)
            self.state = self._merged([self.state, entry[1]], entry[2])
        return bool(ends)
