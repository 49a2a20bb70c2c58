"""The rules of vLLM's sleep levels: when an engine may generate, and what a push wakes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.generation.sleep_cycle import SleepCycle


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_push_wakes_the_weights_first_and_the_cache_last(level):
    cycle = SleepCycle(level)
    for _ in range(2):
        cycle.check_generate()
        assert cycle.sleep() == level
        assert cycle.begin_push() == (["weights"] if level else [])
        assert cycle.end_push() == (["kv_cache"] if level else [])


def test_after_level_2_an_engine_generates_only_after_a_full_push():
    cycle = SleepCycle(2)
    assert cycle.has_weights
    cycle.sleep()
    assert not cycle.has_weights
    with pytest.raises(RuntimeError, match="holds no weights"):
        cycle.check_generate()
    cycle.begin_push()
    with pytest.raises(RuntimeError, match="holds no weights"):
        cycle.check_generate()
    cycle.end_push()
    cycle.check_generate()


def test_a_repeated_push_wakes_nothing_twice():
    cycle = SleepCycle(1)
    cycle.sleep()
    assert cycle.begin_push() == ["weights"]
    assert cycle.begin_push() == []
    assert cycle.end_push() == ["kv_cache"]


@given(level=st.integers(0, 2), calls=st.lists(st.sampled_from(["sleep", "begin_push", "end_push"]), max_size=12))
def test_an_engine_may_generate_only_when_it_is_awake_and_holds_whole_weights(level, calls):
    cycle = SleepCycle(level)
    in_memory = {"weights", "kv_cache"}
    whole = True
    for call in calls:
        if call == "end_push" and whole:
            continue
        result = getattr(cycle, call)()
        if call == "sleep" and result:
            in_memory.clear()
            whole = whole and result < 2
        elif call != "sleep":
            assert not in_memory & set(result)
            in_memory |= set(result)
            whole = call == "end_push"
        try:
            cycle.check_generate()
        except RuntimeError:
            assert not whole or len(in_memory) < 2
        else:
            assert whole
            assert len(in_memory) == 2
