"""Launchers are asked apart from passes, one round at a time for each job; what a replaced pod said is not used."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Self

from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.jobs import Jobs, Round
from grpo_operator.passes.launchers import AT_ONCE, Launchers
from grpo_operator.runtime.kept import Key
from grpo_spec.reports import ExitCode, Progress
from support.control_plane.jobs import ended, pod
from support.control_plane.virtual_time import in_world

KEY = Key("ns", "job", "uid")
A, B = (replace(pod(name, uid=f"{name}-1"), ip=name) for name in ("a", "b"))
SILENCE = 2.0


class Source:
    """Launchers by the address of their pods; those without an answer are silent. `requests`: who was asked when."""

    def __init__(self, **answers: Progress) -> None:
        self.answers, self.seconds = answers, 0.1
        self.requests: list[tuple[str, float]] = []
        self.open: Counter[str] = Counter()
        self.most = 0

    async def fetch(self, ip: str, port: int) -> Progress | None:
        assert port == 8080
        self.requests.append((ip, asyncio.get_running_loop().time()))
        self.open[ip] += 1
        self.most = max(self.most, self.open.total())
        try:
            await asyncio.sleep(self.seconds if ip in self.answers else SILENCE)
        finally:
            self.open[ip] -= 1
        return self.answers.get(ip)


class World:
    """Launchers that ask a source, and the jobs that they woke."""

    def __init__(self, **answers: Progress) -> None:
        self.source, self.woken = Source(**answers), list[Key]()
        self.jobs = Jobs(lambda: 0.0, Instruments())
        self.launchers = Launchers(self.source, self.jobs, self.woken.append, Instruments())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.launchers.close()
        assert not +self.source.open, "nobody is asked after the end"

    def follow(self, *pods: ObservedPod, seconds: float = 9.0, asks_all: bool = False, key: Key = KEY) -> None:
        self.launchers.follow(key, Round(8080, pods, lambda _: asks_all), seconds)

    def steps(self, *pods: ObservedPod) -> dict[str, int]:
        return {name: said.step for name, said in self.launchers.reports(KEY, pods).items()}


@in_world(World, a=Progress(step=3), b=Progress(step=4))
async def test_a_pod_is_asked_at_once_the_first_time_and_its_answer_wakes_the_job(world: World) -> None:
    world.follow(A, B)
    assert world.steps(A, B) == {}
    await asyncio.sleep(1.0)
    assert world.woken == [KEY]
    assert world.steps(A, B) == {"a": 3}
    world.follow(A, B)
    await asyncio.sleep(20.0)
    assert world.source.requests == [("a", 0.0), ("a", 10.0)]


@in_world(World)
async def test_a_pass_never_waits_for_a_launcher_and_silence_wakes_nobody(world: World) -> None:
    for _ in range(10):  # passes that come sooner than the launcher's silence ends
        world.follow(A, seconds=0.5)
        assert world.steps(A) == {}
        await asyncio.sleep(1.0)
    assert world.woken == []
    assert world.source.most == 1, "one round at a time"
    assert len(world.source.requests) >= 3, "it is asked again and again"


@in_world(World, a=Progress(step=3))
async def test_passes_that_come_often_put_off_no_round(world: World) -> None:
    for _ in range(30):
        world.follow(A)
        await asyncio.sleep(1.0)
    assert [round(at) for _, at in world.source.requests] == [0, 10, 20]


@in_world(World, a=Progress(step=3))
async def test_a_launcher_that_falls_silent_has_no_progress(world: World) -> None:
    world.follow(A)
    await asyncio.sleep(1.0)
    world.source.answers.clear()
    world.follow(A)
    assert world.steps(A) == {"a": 3}
    await asyncio.sleep(20.0)
    assert world.steps(A) == {}


@in_world(World, a=Progress(step=3), b=Progress(step=4))
async def test_if_rank_0_calls_for_it_all_others_are_asked(world: World) -> None:
    world.follow(A, B, asks_all=True)
    await asyncio.sleep(1.0)
    assert world.steps(A, B) == {"a": 3, "b": 4}


@in_world(World, a=Progress(step=3))
async def test_what_a_replaced_or_ended_pod_said_is_not_used(world: World) -> None:
    world.follow(A)
    await asyncio.sleep(1.0)
    assert world.steps(replace(A, uid="another")) == {}
    assert world.steps(replace(A, endings=(Ending(ended(ExitCode.DONE)),))) == {}
    world.follow(replace(A, uid="another"), seconds=1000.0)
    await asyncio.sleep(1.0)
    assert world.steps(replace(A, uid="another")) == {"a": 3}, "the new pod is asked at once"
    assert world.steps(A) == {}


@in_world(World, a=Progress(step=3))
async def test_an_answer_that_comes_after_its_pod_was_replaced_is_not_used(world: World) -> None:
    world.source.seconds = 1.5
    world.follow(A)
    await asyncio.sleep(1.0)
    world.follow(replace(A, uid="another"))
    await asyncio.sleep(1.0)
    assert world.steps(replace(A, uid="another")) == {}
    world.follow(replace(A, uid="another"))
    await asyncio.sleep(2.0)
    assert world.steps(replace(A, uid="another")) == {"a": 3}


@in_world(World, a=Progress(), b=Progress())
async def test_a_pod_without_an_address_is_not_asked_and_nothing_old_is_kept(world: World) -> None:
    world.follow(A)
    await asyncio.sleep(1.0)
    world.follow(replace(A, ip=None), B)
    await asyncio.sleep(20.0)
    assert world.steps(A, B) == {}
    assert world.source.requests == [("a", 0.0)]


@in_world(World, a=Progress())
async def test_a_forgotten_job_is_asked_no_more_and_not_woken(world: World) -> None:
    world.follow(A)
    await asyncio.sleep(0.05)
    world.jobs.forget(KEY)  # while it is asked
    await asyncio.sleep(20.0)
    assert world.woken == []
    world.follow(A)
    await asyncio.sleep(1.0)
    world.follow(A)
    world.jobs.forget(KEY)  # before it is asked
    assert world.steps(A) == {}
    await asyncio.sleep(20.0)
    assert [at for _, at in world.source.requests] == [0.0, 20.05]


@in_world(World)
async def test_many_silent_launchers_are_asked_a_limited_number_at_a_time(world: World) -> None:
    for number in range(2 * AT_ONCE):
        one = replace(A, uid=str(number), ip=str(number))
        world.follow(one, key=Key("ns", str(number), "uid"))
    await asyncio.sleep(3 * SILENCE)
    assert len(world.source.requests) == 2 * AT_ONCE
    assert world.source.most == AT_ONCE
