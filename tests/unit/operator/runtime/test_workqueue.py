"""The work queue: no wake is lost, bursts cost few passes, failures back off, and a closed gate lets no pass begin."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.errors import ConflictError
from grpo_operator.runtime.workqueue import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, WorkQueue
from support.control_plane.virtual_time import in_virtual_time

Outcome = float | None | Exception
Work = Callable[[str], Awaitable[float | None]]
ROUNDING = 1e-6


@dataclass
class Passes:
    """The work of a queue: what each pass takes and how it ends, and when each began, by key."""

    plan: Callable[[int], tuple[float, Outcome]]
    began: list[tuple[str, float]] = field(default_factory=list)
    under_way: Counter[str] = field(default_factory=Counter)
    most: int = 0

    async def __call__(self, key: str) -> float | None:
        seconds, outcome = self.plan(len(self.began))
        self.began.append((key, _now()))
        self.under_way[key] += 1
        self.most = max(self.most, self.under_way.total())
        assert self.under_way[key] == 1, "a key has one pass at a time"
        await asyncio.sleep(seconds)
        self.under_way[key] -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def times(self, key: str = "a") -> list[float]:
        return [at for one, at in self.began if one == key]

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times())]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _queue(work: Work, *, limit: int = 32, is_open: bool = True) -> tuple[WorkQueue[str], asyncio.Event]:
    gate = asyncio.Event()
    if is_open:
        gate.set()
    return WorkQueue(work, Instruments(), gate=gate, limit=limit), gate


async def _woken(plan: Callable[[int], tuple[float, Outcome]]) -> Passes:
    """Return the passes over a key that is woken once."""
    passes = Passes(plan)
    queue, _ = _queue(passes)
    queue.wake("a")
    await _done(queue)
    return passes


async def _done(queue: WorkQueue[str]) -> None:
    while queue.keys:  # noqa: ASYNC110  # the queue sets no event
        await asyncio.sleep(1.0)


GAPS = st.sampled_from([0.0, 0.01, 0.1, 0.2, 0.21, 0.5, 3.0, 100.0])
SECONDS = st.sampled_from([0.0, 0.05, 0.3, 5.0])
OUTCOMES = st.sampled_from([None, None, 0.0, 1.0, 30.0, ConflictError("changed"), RuntimeError("no luck")])


@given(wakes=st.lists(st.tuples(st.sampled_from("ab"), GAPS), max_size=12), ends=st.lists(st.tuples(SECONDS, OUTCOMES)))
@in_virtual_time
async def test_each_wake_is_followed_by_a_pass(
    wakes: list[tuple[str, float]], ends: list[tuple[float, Outcome]]
) -> None:
    passes = Passes(lambda number: ends[number] if number < len(ends) else (0.0, None))
    queue, _ = _queue(passes)
    woken: dict[str, float] = {}
    for key, gap in wakes:
        queue.wake(key)
        woken[key] = _now()
        await asyncio.sleep(gap)
    await _done(queue)
    for key, last in woken.items():
        assert max(passes.times(key)) >= last, "the last wake is not lost"
        for earlier, later in pairwise(passes.times(key)):
            assert later - earlier >= PAUSE_SECONDS - ROUNDING
    await queue.close()


@in_virtual_time
async def test_a_burst_of_wakes_costs_two_passes() -> None:
    passes = Passes(lambda _: (0.05, None))
    queue, _ = _queue(passes)
    for _ in range(1000):
        queue.wake("a")
        await asyncio.sleep(0.0001)
    await _done(queue)
    assert len(passes.began) == 2


@in_virtual_time
async def test_wakes_while_a_key_waits_for_a_slot_cost_no_pass_of_their_own() -> None:
    passes = Passes(lambda _: (10.0, None))
    queue, _ = _queue(passes, limit=1)
    queue.wake("b")
    for _ in range(20):
        queue.wake("a")
        await asyncio.sleep(0.4)
    await _done(queue)
    assert passes.times("a") == [10.0]


@in_virtual_time
async def test_the_pause_is_as_long_as_the_pass_within_limits() -> None:
    passes = await _woken(lambda number: ([0.0, 1.0, 60.0][number % 3], 0.0 if number < 3 else None))
    assert passes.gaps() == pytest.approx([PAUSE_SECONDS, 1.0 + 1.0, 60.0 + LONGEST_PAUSE_SECONDS])


@in_virtual_time
async def test_a_due_pass_comes_in_time_and_a_wake_before_it_too() -> None:
    passes = Passes(lambda number: (0.0, 30.0 if number < 2 else None))
    queue, _ = _queue(passes)
    queue.wake("a")
    await asyncio.sleep(10.0)
    queue.wake("a")
    await _done(queue)
    assert passes.times() == pytest.approx([0.0, 10.0, 40.0])


@in_virtual_time
async def test_failures_back_off_up_to_a_minute_and_a_success_ends_it() -> None:
    failures = 12
    ends: list[Outcome] = [*[RuntimeError("no luck")] * failures, 0.0, RuntimeError("again"), None]
    passes = await _woken(lambda number: (0.0, ends[number]))
    backoffs = [min(60.0, 0.2 * 2**number) for number in range(failures)]
    assert passes.gaps() == pytest.approx([*backoffs, PAUSE_SECONDS, 0.2])


@in_virtual_time
async def test_conflicts_are_tried_again_soon_however_many_there_are() -> None:
    passes = await _woken(lambda number: (0.0, ConflictError("changed") if number < 20 else None))
    assert len(passes.began) == 21
    assert all(PAUSE_SECONDS - ROUNDING <= gap <= 2 * PAUSE_SECONDS for gap in passes.gaps())


@in_virtual_time
async def test_a_failing_key_does_not_delay_others_and_waiting_keys_hold_no_slot() -> None:
    ends: dict[str, Outcome] = {"fails": RuntimeError("no luck"), "waits": 1000.0}

    async def work(key: str) -> float | None:
        began.append((key, _now()))
        outcome = ends.get(key)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    began: list[tuple[str, float]] = []
    queue, _ = _queue(work, limit=1)
    queue.wake("fails")
    queue.wake("waits")
    await asyncio.sleep(0.1)
    queue.wake("a")
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert began[-1] == ("a", 0.1)
    await queue.close()


@in_virtual_time
async def test_so_many_passes_run_at_once_as_there_are_slots() -> None:
    passes = Passes(lambda _: (1.0, None))
    queue, _ = _queue(passes, limit=3)
    for key in "abcdefgh":
        queue.wake(key)
    await _done(queue)
    assert passes.most == 3
    assert len(passes.began) == 8


@in_virtual_time
async def test_others_have_their_turn_between_two_passes_however_many_are_due() -> None:
    """Planning thousands of jobs in one round of the event loop would keep answers, such as the Lease's, waiting."""
    order: list[str] = []

    async def work(key: str) -> None:
        order.append(key)

    async def other() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    queue, gate = _queue(work, is_open=False)
    keys = [str(number) for number in range(100)]
    for key in keys:
        queue.wake(key)
    await asyncio.sleep(0)
    task = asyncio.create_task(other())
    gate.set()
    for _ in range(1000):
        await asyncio.sleep(0)
    task.cancel()
    passes = [number for number, one in enumerate(order) if one != "other"]
    assert len(passes) == len(keys)
    assert all("other" in order[one:later] for one, later in pairwise(passes))
    await queue.close()


@in_virtual_time
async def test_passes_begin_only_while_the_gate_is_open() -> None:
    passes = Passes(lambda _: (1.0, None))
    queue, gate = _queue(passes, limit=1, is_open=False)
    for key in "ab":
        queue.wake(key)
    await asyncio.sleep(100.0)
    assert passes.began == []
    gate.set()
    await asyncio.sleep(0.5)
    assert passes.began == [("a", 100.0)]
    gate.clear()  # while b waits for the slot of a
    queue.wake("a")
    await asyncio.sleep(100.0)
    assert passes.began == [("a", 100.0)], "no pass begins with a closed gate"
    gate.set()
    await _done(queue)
    assert Counter(key for key, _ in passes.began) == {"a": 2, "b": 1}
