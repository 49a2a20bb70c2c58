"""Conditions that only a run decides: all branches are followed, and what they differ in is not known afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import takewhile

from grpo_cli.convert.shell.conditions import Conditions
from grpo_cli.convert.shell.state import State

Run = Callable[[], bool | None]


class Stop(Exception):  # noqa: N818 - no error: what ends a block early
    def __init__(self, line: int, status: bool | None = None, kind: str = "") -> None:
        self.line, self.status, self.kind = line, status, kind


class Exit(Stop):
    pass


class Return(Stop):
    pass


class Break(Stop):
    pass


class Branches(Conditions):
    """States of branches, and of subshells."""

    def __init__(self, source: bytes, given: dict[str, str]) -> None:
        super().__init__(source, given)
        self._early: list[tuple[Stop, State, int]] = []  # ends of blocks under conditions that are not known
        self._condition: int | None = None  # the line of the outermost of these conditions

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
