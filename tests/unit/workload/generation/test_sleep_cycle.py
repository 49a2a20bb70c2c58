"""The rules of vLLM's sleep levels: when an engine may generate, and what a push wakes."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.generation.sleep_cycle import SleepCycle

WHY = {True: "is asleep", False: "holds no weights"}


@given(level=st.integers(0, 2), calls=st.lists(st.sampled_from(["sleep", "begin_push", "end_push"]), max_size=12))
def test_a_push_wakes_weights_first_and_the_cache_last_and_only_then_an_engine_may_generate(level, calls):
    cycle, asleep, whole = SleepCycle(level), set(), True
    for call in calls:
        result = getattr(cycle, call)()
        if call == "sleep":
            assert result == (0 if asleep else level)
            asleep = {"weights", "kv_cache"} if result else asleep
            whole = whole and result < 2
        else:
            woken = {"weights"} if call == "begin_push" else {"kv_cache"}
            assert result == list(woken & asleep)
            asleep, whole = asleep - woken, call == "end_push"
        assert cycle.has_weights == whole
        with nullcontext() if whole and not asleep else pytest.raises(RuntimeError, match=WHY[whole]):
            cycle.check_generate()
