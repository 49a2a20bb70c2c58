"""The collector of garbage does not look at objects that stay, and works for others as before."""

import gc
import weakref

import pytest

from grpo_workload.ranks.kept_objects import kept_objects


class Knot:
    """Garbage that only the collector finds, once nothing else refers to it."""

    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def _thaws():
    yield
    gc.unfreeze()


def test_nothing_is_collected_meanwhile_and_all_that_is_there_is_kept():
    with kept_objects():
        assert not gc.isenabled()
        kept = weakref.ref(Knot())
    gc.collect()
    assert gc.isenabled()
    assert kept() is not None


def test_later_garbage_is_collected_and_an_error_leaves_the_collector_on():
    with pytest.raises(KeyError), kept_objects():
        raise KeyError
    assert gc.isenabled()
    later = weakref.ref(Knot())
    gc.collect()
    assert later() is None
