"""Rewards read an environment as it was after its episode; some exceptions are failures of its connection."""

import sys
from types import SimpleNamespace

import pytest

from grpo_workload.environments.results import is_connection
from grpo_workload.environments.state import rebuild, snapshot
from support.trainer.user_tools import Counter


class Slotted:
    __slots__ = ("empty", "number", "table")

    def __init__(self):
        self.number, self.table = 3, {"a": [1]}


def test_attributes_of_slots_are_kept(monkeypatch):
    module = type(sys)("user_slots")
    module.Slotted = Slotted
    monkeypatch.setitem(sys.modules, "user_slots", module)
    monkeypatch.setattr(Slotted, "__module__", "user_slots")
    state, left_out = snapshot(Slotted())
    found = rebuild(state)
    assert (found.number, found.table, hasattr(found, "empty"), left_out) == (3, {"a": [1]}, False, {})


def test_what_does_not_pickle_and_then_the_largest_is_left_out():
    counter = Counter(1)
    counter.small, counter.large, counter.larger = "a" * 100, b"b" * 2000, b"c" * 4000
    state, left_out = snapshot(counter, limit=1000)
    assert len(state) <= 1000
    assert {name: why.split()[0] for name, why in left_out.items()} == {
        "lock": "TypeError:",
        "larger": "it",
        "large": "it",
    }
    found = rebuild(state)
    assert isinstance(found, Counter)
    assert vars(found) == {"start": 1, "numbers": [], "row": {}, "small": "a" * 100}


def test_a_class_that_cannot_be_imported_becomes_a_namespace(monkeypatch):
    monkeypatch.setattr(Counter, "__module__", "no_such_module")
    state, _ = snapshot(Counter(2))
    assert rebuild(state) == SimpleNamespace(start=2, numbers=[], row={})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BrokenPipeError(), True),
        (TimeoutError(), True),
        (type("ReadTimeout", (type("TimeoutException", (Exception,), {}),), {})(), True),
        (type("ConnectError", (Exception,), {})(), True),
        (type("ConnectionClosedError", (type("ConnectionClosed", (Exception,), {}),), {})(), True),
        (type("RemoteProtocolError", (type("TransportError", (Exception,), {}),), {})(), True),
        (type("Timeout", (Exception,), {})(), False),
        (FileNotFoundError(), False),
        (ValueError("ConnectionError"), False),
    ],
)
def test_connections(error, expected):
    assert is_connection(error) is expected
