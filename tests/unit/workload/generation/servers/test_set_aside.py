"""Engines that cannot take part in pushes: how long each is left out, and what brings it back."""

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.roster import Observation
from grpo_workload.generation.servers.set_aside import LONGEST, SetAside

ENGINE = Engine(name="b", pod="job-b", group="g", host="h", port=80, devices=(0,), elastic=True)
WHY = EngineError(ENGINE, "hangs")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def seen(**processes: str) -> Observation:
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
