"""The choice of the engine for the next prompt: the one with room and the fewest samples in flight for each copy."""

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from grpo_spec.contract import Engine
from grpo_workload.generation.servers.routing import SAMPLES_IN_FLIGHT, Idle, Lane, Router, choose


def engine(index, data_parallel=1):
    name, copies = f"engine-{index}", {"data_parallel": data_parallel, "devices": range(data_parallel)}
    return Engine(name=name, pod=name, group="generation", host="h", port=8000, **copies)


@given(
    lanes=st.lists(st.tuples(st.sampled_from(range(0, 257, 8)), st.integers(1, 3)), min_size=1, max_size=6),
    num_samples=st.integers(1, 1100),
    first=st.integers(0, 100),
)
@example(lanes=[(8, 1), (8, 1), (16, 1)], num_samples=8, first=1)
@example(lanes=[(256, 1), (256, 1), (248, 1)], num_samples=8, first=0)
@example(lanes=[(8, 1), (12, 2)], num_samples=8, first=0)
def test_the_next_lane_with_room_and_the_fewest_in_flight_for_each_copy_is_chosen(lanes, num_samples, first):
    """An idle engine takes a group of any size."""
    all_lanes = [Lane(engine(index, copies), in_flight=count) for index, (count, copies) in enumerate(lanes)]
    room = [
        (count / copies, (place - first) % len(lanes), place)
        for place, (count, copies) in enumerate(lanes)
        if count == 0 or count + num_samples <= SAMPLES_IN_FLIGHT * copies
    ]
    assert choose(all_lanes, num_samples, first) is (all_lanes[min(room)[2]] if room else None)


def router(count, *, first=0, process="a"):
    """Return a router over so many engines."""
    made = Router(first=first)
    use(made, count, process)
    return made


def use(made, count, process):
    engines = {engine(index).name: engine(index) for index in range(count)}
    made.use(engines, dict.fromkeys(engines, process))


def test_ranks_with_one_prompt_each_use_all_engines():
    async def first_choice(rank):
        return (await router(4, first=rank).acquire(8)).engine.name

    assert {asyncio.run(first_choice(rank)) for rank in range(4)} == {engine(index).name for index in range(4)}


async def test_a_prompt_without_a_lane_waits_until_one_is_released():
    both = router(2)
    taken = [await both.acquire(SAMPLES_IN_FLIGHT) for _ in range(2)]
    waiting = asyncio.create_task(both.acquire(8))
    await asyncio.sleep(0)
    assert not waiting.done()

    both.release(taken[1], SAMPLES_IN_FLIGHT)

    assert await waiting is taken[1]
    assert taken[1].in_flight == 8


async def test_prompts_wait_while_no_engine_is_left_and_go_to_the_next_process():
    one = router(1)
    lost = await one.acquire(8)
    one.close(lost)
    assert one.deserted.is_set()
    waiting = asyncio.create_task(one.acquire(8))
    await asyncio.sleep(0)
    assert not waiting.done()

    use(one, 1, "b")

    lane = await waiting
    assert (lane.process, lane.in_flight, one.deserted.is_set()) == ("b", 8, False)
    one.release(lost, 8)
    assert lane.in_flight == 8, "the lost process had a load of its own"


async def test_requests_in_flight_count_while_engines_get_new_weights():
    two = router(2)
    taken = await two.acquire(8)
    use(two, 2, "a")
    assert await two.acquire(8) is not taken


def test_engines_are_idle_while_nothing_is_in_flight():
    now = [0.0]
    idle = Idle(lambda: now[0])

    def after(seconds):
        now[0] += seconds
        return idle

    after(2).add(8)
    after(5).add(8)
    after(1).add(-8)
    after(1).add(-8)
    assert after(3).take() == 5
    assert after(1).take() == 1
    after(1).add(4)
    assert (after(7).take(), after(7).take()) == (1, 0)
