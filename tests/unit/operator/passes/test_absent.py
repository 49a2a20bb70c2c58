"""Events about pods that wait are read once for all jobs of a namespace that wait, however many these are."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.times import rfc3339
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.absent import REFUSED, UNPREPARED, AbsentPods, SharedEvents
from grpo_operator.passes.jobs import Jobs
from grpo_operator.runtime.kept import Key
from support.control_plane.jobs import NOW, observed, pod
from support.control_plane.passes import A, B, Case
from support.control_plane.virtual_time import in_virtual_time


class Events:
    """A cluster that has an event for each of two objects, and counts the lists."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.lists, self.fails = seconds, list[str](), False

    async def events(self, namespace: str, which: str) -> list[dict[str, Any]]:
        self.lists.append(f"{namespace} {which}")
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise TimeoutError("etcd is slow")
        said = {"reason": "FailedMount", "type": "Warning", "deprecatedLastTimestamp": rfc3339(NOW)}
        return [said | {"note": f"{len(self.lists)} {uid}", "regarding": {"uid": uid}} for uid in ("a", "b")]


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_jobs_that_ask_at_once_share_a_list_and_later_ones_get_a_new_one() -> None:
    cluster = Events(0.05)
    events = SharedEvents(cluster)
    begin = now()
    asked = [events.of("n", REFUSED, uid, begin) for uid in ("a", "b", "other") * 100]
    answers = await asyncio.gather(*asked)
    assert [[event["note"] for event in one] for one in answers[:3]] == [["1 a"], ["1 b"], []]
    assert cluster.lists == [f"n {REFUSED}"]
    await events.of("m", REFUSED, "a", begin)
    assert cluster.lists == [f"n {REFUSED}", f"m {REFUSED}"]
    while (await events.of("n", REFUSED, "a", now()))[0]["note"] != "3 a":
        assert now() < begin + 60
        await asyncio.sleep(0.01)


@in_virtual_time
async def test_a_list_that_takes_long_serves_for_twenty_times_as_long() -> None:
    cluster = Events(0.05)
    events = SharedEvents(cluster)
    begin = now()
    for _ in range(3):
        await events.of("n", REFUSED, "a", now())
    assert now() - begin > 1 or len(cluster.lists) == 1


@in_virtual_time
async def test_a_list_that_fails_fails_for_one_job_and_the_others_get_what_was_known() -> None:
    cluster = Events(0.05)
    events = SharedEvents(cluster)
    await events.of("n", REFUSED, "a", now())
    while len(cluster.lists) < 2:
        cluster.fails, asked = True, [events.of("n", REFUSED, "a", now()) for _ in range(100)]
        first, *others = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.01)
    assert isinstance(first, TimeoutError)
    assert [[event["note"] for event in one] for one in others] == [["1 a"]] * 99
    assert len(cluster.lists) == 2, "they would wait for each other, for as long as a hundred lists take to fail"


@in_virtual_time
async def test_a_job_that_leaves_while_it_reads_lets_another_read() -> None:
    cluster = Events(0.05)
    events = SharedEvents(cluster)
    begin = now()
    leaving, staying = (asyncio.ensure_future(events.of("n", REFUSED, "a", begin)) for _ in range(2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert [event["note"] for event in await staying] == ["2 a"]
    with pytest.raises(asyncio.CancelledError):
        await leaving


@in_virtual_time
async def test_the_cluster_is_asked_about_a_pod_that_is_not_prepared_after_seconds_and_about_no_other() -> None:
    cluster, case = Events(), Case()
    pods = AbsentPods(cluster, Jobs(lambda: 0.0, Instruments()))
    held = replace(pod(A, uid="a"), waiting="ContainerCreating", prepared=False)

    async def look(*seen: ObservedPod) -> tuple[float, list[str | None]]:
        said = await pods.explain(Key("n", "job", "uid"), case.status, case.topology, observed(*seen))
        return now(), [one.waiting for one in said.pods.values()]

    answers: list[tuple[float, str | None]] = [(0, None)]
    while now() < 60:
        at, (waiting, other) = await look(held, pod(B))
        assert other is None
        if waiting != answers[-1][1]:
            answers.append((at, waiting))
        await asyncio.sleep(1)
    for _ in range(60):  # it pulls its image
        await look(replace(held, prepared=True), pod(B))
        await asyncio.sleep(1)
    assert answers[1:] == [
        (0, "ContainerCreating"),
        (4, "FailedMount: 1 a"),
        (12, "FailedMount: 2 a"),
        (28, "FailedMount: 3 a"),
    ]
    assert cluster.lists == [f"n {UNPREPARED}"] * 3
