"""Engines come and go in any order: none is used that was not in the last push that went through."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from grpo_workload.contract import Engine
from grpo_workload.generation.roster import Roster, Sight, agreed, is_lost

NAMES = ("a", "b", "c")
ENGINE = Engine(name="a", pod="a-0", group="g", host="h", port=1, devices=(0,), rank_offset=1)


class Engines(RuleBasedStateMachine):
    """The real engines, and a roster that hears of them only by sights."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = dict.fromkeys(NAMES, 1)
        self.held: dict[str, int] = {}  # by process: the version it was filled with
        self.version = 0
        self.roster = Roster()
        self.groups: set[int] = set()

    def processes(self) -> dict[str, str]:
        return {name: f"{name}.{start}" for name, start in self.starts.items()}

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.starts[name] += 1

    @rule(lost=st.none() | st.sampled_from(NAMES), new_version=st.booleans())
    def push(self, lost: str | None, new_version: bool) -> None:
        """What the generator does at a push, where an engine may be lost after it was seen."""
        seen = agreed([Sight(processes=self.processes()), Sight(processes={"a": self.processes()["a"]})])
        assert seen == self.processes()
        if lost is not None:
            self.starts[lost] += 1
        if self.roster.group != seen:
            generation = self.roster.begin_group()
            assert generation not in self.groups
            self.groups.add(generation)
            if seen != self.processes():
                self.roster.failed()
                return
            self.roster.joined(seen)
        self.roster.begin_push()
        if seen != self.processes():
            assert is_lost(seen, [Sight(processes=self.processes())])
            self.roster.failed()
            return
        self.version += new_version
        self.held |= dict.fromkeys(self.processes().values(), self.version)
        self.roster.pushed()

    @invariant()
    def what_is_used_holds_the_current_weights(self) -> None:
        assert all(self.held[process] == self.version for process in self.roster.current.values())

    @invariant()
    def a_group_is_pushed_to_as_it_was_joined(self) -> None:
        assert not self.roster.current or self.roster.current == self.roster.group

    @precondition(lambda self: self.roster.current)
    @rule()
    def a_new_process_is_never_used(self) -> None:
        lost = {name for name, process in self.processes().items() if self.roster.current[name] != process}
        assert bool(lost) == is_lost(self.roster.current, [Sight(processes=self.processes())])


Engines.TestCase.settings = settings(max_examples=50, stateful_step_count=20)
TestEngines = Engines.TestCase


def test_ranks_that_see_different_processes_look_again() -> None:
    assert agreed([Sight(processes={"a": "a.1"}), Sight(processes={"a": "a.2"})]) is None
    assert agreed([Sight(processes={"a": "a.1"}), Sight(processes={"b": "b.1"})]) == {"a": "a.1", "b": "b.1"}


def test_an_ill_engine_is_waited_for_and_lost() -> None:
    ill = Sight(processes={}, ill=ENGINE, trouble="refuses connections")
    assert agreed([Sight(processes={"a": "a.1"}), ill]) is None
    assert is_lost({"a": "a.1"}, [Sight(processes={"a": "a.1"}), ill])
    assert not is_lost({"a": "a.1"}, [Sight(processes={"a": "a.1"})])
