"""Events about refused pods are read once for all jobs of a namespace that wait, however many these are."""

import asyncio
from typing import Any, cast

from grpo_operator.passes.absent import Refusals
from grpo_operator.runtime.cluster import Cluster


class Events:
    """A cluster that has an event for each of two objects, and counts the lists."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.lists = seconds, list[str]()

    async def events(self, namespace: str, reason: str) -> list[dict[str, Any]]:
        self.lists.append(f"{namespace} {reason}")
        await asyncio.sleep(self.seconds)
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
