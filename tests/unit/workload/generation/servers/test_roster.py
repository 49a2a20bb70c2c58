"""The roster of engines: whatever the order of restarts, no process is used that missed the last completed push.

How long engines are left out that cannot take part in pushes, and what brings them back.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.roster import Observation, Roster, agreed, is_lost
from grpo_workload.generation.servers.set_aside import LONGEST, SetAside

NAMES = ("a", "b", "c")
ENGINE = Engine(name="b", pod="job-b", group="g", host="h", port=80, devices=(0,), elastic=True)


class Engines(RuleBasedStateMachine):
    """The real engines, and a roster that learns about them only from observations."""

    def __init__(self):
        super().__init__()
        self.starts = dict.fromkeys(NAMES, 1)
        self.held: dict[str, int] = {}  # by process: version of the weights that it got
        self.version = 0
        self.roster = Roster()

    def processes(self):
        return {name: f"{name}.{start}" for name, start in self.starts.items()}

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name):
        self.starts[name] += 1

    @rule(lost=st.none() | st.sampled_from(NAMES), new_version=st.booleans())
    def push(self, lost, new_version):
        """Push as the generator does; an engine may be lost after it was observed."""
        seen = agreed([Observation(processes=self.processes()), Observation(processes={"a": self.processes()["a"]})])
        assert seen == self.processes()
        if lost is not None:
            self.starts[lost] += 1
        if self.roster.group != seen:
            self.roster.begin_group()
            if seen != self.processes():
                self.roster.failed()
                return
            self.roster.joined(seen)
        self.roster.begin_push()
        if seen != self.processes():
            assert is_lost(seen, [Observation(processes=self.processes())])
            self.roster.failed()
            return
        self.version += new_version
        self.held |= dict.fromkeys(self.processes().values(), self.version)
        self.roster.pushed()

    @invariant()
    def processes_in_use_hold_the_current_weights(self):
        assert all(self.held[process] == self.version for process in self.roster.current.values())

    @invariant()
    def processes_in_use_are_those_of_the_group(self):
        assert not self.roster.current or self.roster.current == self.roster.group

    @precondition(lambda self: self.roster.current)
    @rule()
    def a_restarted_engine_counts_as_lost(self):
        lost = {name for name, process in self.processes().items() if self.roster.current[name] != process}
        assert bool(lost) == is_lost(self.roster.current, [Observation(processes=self.processes())])


Engines.TestCase.settings = settings(max_examples=50, stateful_step_count=20)
TestEngines = Engines.TestCase


def test_ranks_that_see_different_processes_do_not_agree():
    assert agreed([Observation(processes={"a": "a.1"}), Observation(processes={"a": "a.2"})]) is None
    both = agreed([Observation(processes={"a": "a.1"}), Observation(processes={"b": "b.1"})])
    assert both == {"a": "a.1", "b": "b.1"}


def test_an_unhealthy_engine_is_lost_and_prevents_agreement():
    healthy = Observation(processes={"a": "a.1"})
    unhealthy = Observation(processes={}, unhealthy=ENGINE, trouble="refuses connections")
    assert agreed([healthy, unhealthy]) is None
    assert is_lost({"a": "a.1"}, [healthy, unhealthy])
    assert not is_lost({"a": "a.1"}, [healthy])


SEEN = st.fixed_dictionaries({"needed": st.just("n.1")}, optional={"one": st.just("o.1"), "two": st.sampled_from("tu")})


@given(st.lists(SEEN, min_size=1, max_size=4))
def test_an_elastic_engine_is_used_if_all_ranks_see_the_same_process_and_is_never_waited_for(seen):
    elastic = ("one", "two")
    ranks = [Observation(processes=processes) for processes in seen]
    together = agreed(ranks, elastic)
    assert together == {
        name: process for name, process in seen[0].items() if all(processes.get(name) == process for processes in seen)
    }
    assert not is_lost(together, ranks, elastic), "nobody lacks what all see, and an engine that comes is no loss"
    for name in together.keys() & elastic:
        rest = {engine: process for engine, process in seen[0].items() if engine != name}
        assert is_lost(together, [*ranks, Observation(processes=rest)], elastic)


WHY = EngineError(ENGINE, "hangs")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def seen(**processes):
    return Observation(processes=processes)


def test_it_is_left_out_twice_as_long_each_time_up_to_an_hour():
    aside = SetAside(60, clock := Clock())
    waits = []
    for _ in range(9):
        waits.append(seconds := aside.add("b.1", WHY))
        clock.now += seconds - 1
        assert aside.rest(seen(a="a.1", b="b.1")) == seen(a="a.1")
        clock.now += 1
        assert aside.rest(seen(a="a.1", b="b.1")) == seen(a="a.1", b="b.1"), "it is tried again"
    assert waits == [60, 120, 240, 480, 960, 1920, LONGEST, LONGEST, LONGEST]


def test_another_process_of_the_engine_is_tried_at_once():
    aside = SetAside(60, Clock())
    assert aside.add("b.1", WHY) == 60
    assert aside.add("b.1", WHY) == 120
    assert aside.rest(seen(b="b.2")) == seen(b="b.2")
    assert aside.reasons() == []
    assert aside.add("b.2", WHY) == 60


def test_it_is_named_while_its_pod_is_there_until_it_has_weights():
    aside = SetAside(60, clock := Clock())
    assert aside.reasons() == []
    aside.add("b.1", WHY)
    reason = "engine b (pod job-b, h:80) hangs; it gets no weights and no prompts, and is tried again every 60 s"
    assert aside.reasons() == [reason]
    aside.rest(seen(a="a.1"))
    assert aside.reasons() == [], "its pod is gone"
    clock.now += 61
    aside.rest(seen(b="b.1"))
    assert aside.reasons() == [reason]
    aside.joined({"a": "a.1", "b": "b.1"})
    assert aside.reasons() == []
    assert aside.add("b.1", WHY) == 60, "what it has overcome no longer counts"
