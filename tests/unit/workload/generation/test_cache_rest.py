"""The size of a cache that takes what the trainer leaves: rounded, and at most what a job can use.

The rules of vLLM's sleep levels: when an engine may generate, and what a push wakes.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.generation import GenerationConfig
from grpo_workload.generation.asleep import GROWTH, AsleepWatch
from grpo_workload.generation.cache_rest import GIB, GRAIN, Rest, cache_size, num_sequences
from grpo_workload.generation.sleep_cycle import SleepCycle
from grpo_workload.policy.memory.spare import reserve


class Layer:
    """One kind of attention, whose longest sequence takes so many bytes."""

    def __init__(self, longest):
        self.longest = longest

    def max_memory_usage_bytes(self, _vllm_config):
        return self.longest


class Window(Layer):
    """Another kind."""


def test_a_cache_is_rounded_down_and_ends_where_a_step_needs_no_more():
    two = {"a": Layer(GIB), "b": Layer(GIB)}
    assert cache_size(30 * GIB + 5, None, two, sequences=100) == 30 * GIB
    assert cache_size(30 * GIB - 5, None, two, sequences=100) == 30 * GIB - GRAIN
    assert cache_size(30 * GIB, None, two, sequences=4) == 10 * GIB, "four sequences, and one for vLLM's own block"
    assert cache_size(30 * GIB, None, {"a": Layer(GIB), "b": Window(1)}, sequences=4) == 30 * GIB
    assert cache_size(-5, None, two, sequences=4) < 0, "vLLM says that there is no memory for a cache"


def test_vllm_gets_the_share_that_is_left_and_how_many_sequences_there_are():
    arguments = Rest(bytes=30 * GIB, total=80 * GIB, sequences=64).arguments()
    assert arguments["gpu_memory_utilization"] == 30 / 80
    for most, expected in ((1024, 64), (16, 16)):
        scheduler = SimpleNamespace(max_num_seqs=most)
        config = SimpleNamespace(scheduler_config=scheduler, additional_config=arguments["additional_config"])
        assert num_sequences(config) == expected
    own = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=9), additional_config={"of": "the user"})
    assert num_sequences(own) == 9


def test_a_part_of_the_gpu_stays_free_with_room_for_the_buckets_of_a_checkpoint():
    assert reserve(100 * GIB, 2 * GIB) == 10 * GIB


def test_only_engines_that_sleep_take_the_rest_and_what_users_set_wins():
    def takes_rest(**fields):
        return GenerationConfig.model_validate(fields).takes_rest

    assert takes_rest()
    assert takes_rest(colocate={"sleepLevel": 1})
    assert not takes_rest(colocate={"sleepLevel": 0})
    assert not takes_rest(topology="Server")
    assert not takes_rest(engine="Transformers")
    assert not takes_rest(kvCacheMemory="1Gi")
    assert not takes_rest(gpuMemoryUtilization=0.3)


def test_what_a_sleeping_engine_keeps_is_compared_with_the_first_step(caplog):
    watch = AsleepWatch()
    for used in (0, 3 * GROWTH, 3 * GROWTH + 5, 4 * GROWTH):  # the trial before the first step does not count
        watch.note(used)
    assert not caplog.records
    watch.note(4 * GROWTH + 1)
    watch.note(4 * GROWTH + 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "0.20 GiB more" in caplog.text
    watch.note(6 * GROWTH)
    assert len(caplog.records) == 2


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
