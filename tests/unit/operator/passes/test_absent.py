"""Events about refused pods are read once for all jobs of a namespace that wait, however many these are."""

import asyncio
from typing import Any, cast

import pytest

from grpo_operator.passes.absent import Refusals
from grpo_operator.runtime.cluster import Cluster


class Events:
    """A cluster that has an event for each of two objects, and counts the lists."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.lists, self.fails = seconds, list[str](), False

    async def events(self, namespace: str, reason: str) -> list[dict[str, Any]]:
        self.lists.append(f"{namespace} {reason}")
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise TimeoutError("etcd is slow")
        return [{"note": f"{len(self.lists)} {uid}", "regarding": {"uid": uid}} for uid in ("a", "b")]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_jobs_that_ask_at_once_share_a_list_and_later_ones_get_a_new_one() -> None:
    cluster = Events()

    async def ask() -> None:
        refusals = Refusals(cast(Cluster, cluster))
        begin = now()
        asked = [refusals.of("n", uid, begin) for uid in ("a", "b", "other") * 100]
        answers = await asyncio.gather(*asked)
        assert [[event["note"] for event in one] for one in answers[:3]] == [["1 a"], ["1 b"], []]
        assert cluster.lists == ["n FailedCreate"]
        await refusals.of("m", "a", begin)
        assert cluster.lists == ["n FailedCreate", "m FailedCreate"]
        while (await refusals.of("n", "a", now()))[0]["note"] != "3 a":
            assert now() < begin + 60
            await asyncio.sleep(0.01)

    asyncio.run(ask())


def test_a_list_that_takes_long_serves_for_twenty_times_as_long() -> None:
    cluster = Events(0.05)

    async def ask() -> None:
        refusals = Refusals(cast(Cluster, cluster))
        begin = now()
        for _ in range(3):
            await refusals.of("n", "a", now())
        assert now() - begin > 1 or len(cluster.lists) == 1

    asyncio.run(ask())


def test_a_list_that_fails_fails_for_one_job_and_the_others_get_what_was_known() -> None:
    cluster = Events(0.05)

    async def ask() -> None:
        refusals = Refusals(cast(Cluster, cluster))
        await refusals.of("n", "a", now())
        while len(cluster.lists) < 2:
            cluster.fails, asked = True, [refusals.of("n", "a", now()) for _ in range(100)]
            first, *others = await asyncio.gather(*asked, return_exceptions=True)
            await asyncio.sleep(0.01)
        assert isinstance(first, TimeoutError)
        assert others == [[{"note": "1 a", "regarding": {"uid": "a"}}]] * 99
        assert len(cluster.lists) == 2, "they would wait for each other, for as long as a hundred lists take to fail"

    asyncio.run(ask())


def test_a_job_that_leaves_while_it_reads_lets_another_read() -> None:
    cluster = Events(0.05)

    async def ask() -> None:
        refusals = Refusals(cast(Cluster, cluster))
        begin = now()
        leaving, staying = (asyncio.ensure_future(refusals.of("n", "a", begin)) for _ in range(2))
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert [event["note"] for event in await staying] == ["2 a"]
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(ask())
