"""Kinds are listed seldom and watches continued soon, however they end. Time is virtual."""

import asyncio
from typing import Any

import aiohttp
import pytest

from grpo_operator.runtime import watches as module
from grpo_operator.runtime.errors import ForbiddenError
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.watches import RELIST_SECONDS
from support.control_plane.children import child
from support.control_plane.followed import KEYS, LAST_BACKOFF, FollowedServer
from support.control_plane.memory_api import END, Request, failure
from support.control_plane.virtual_time import in_world

NO_RIGHT = ForbiddenError("list", "PodGroup", "/apis/scheduling.k8s.io/v1beta1/podgroups", "it may not")


def _put(world: FollowedServer, name: str, mark: int = 0) -> None:
    world.store.put(child("Pod", "one", name, job="a", uid="a-1", mark=mark))


def _end(world: FollowedServer, how: Any = END) -> None:
    for stream in world.api.streams:
        stream.stop(how)


@in_world(FollowedServer, "Pod", "ConfigMap")
async def test_each_scope_is_listed_once_an_hour_however_its_watches_end(world: FollowedServer) -> None:
    _put(world, "x")
    for number in range(30):
        await asyncio.sleep(60.0)
        _put(world, "x", number)
        await asyncio.sleep(0.1)
        _end(world, [END, aiohttp.ClientPayloadError("cut off"), TimeoutError()][number % 3])
    assert world.lists("start") == 2
    await asyncio.sleep(2 * RELIST_SECONDS)
    _end(world)
    await asyncio.sleep(LAST_BACKOFF)
    assert (world.lists("start"), world.lists("hourly"), world.lists("expired")) == (2, 2, 0)


@pytest.mark.parametrize("how", [END, aiohttp.ClientPayloadError("cut off")], ids=["ended", "broken"])
@in_world(FollowedServer, "Pod")
async def test_a_quiet_watch_that_is_cut_off_after_a_while_is_continued_soon_every_time(
    world: FollowedServer, how: Any
) -> None:
    """As a proxy does that cuts off connections on which nothing was sent for 50 seconds."""
    for _ in range(12):
        await asyncio.sleep(50.0)
        _end(world, how)
        await asyncio.sleep(1.0)
        assert world.api.streams


@in_world(FollowedServer, "Pod")
async def test_a_watch_that_breaks_at_once_is_tried_again_more_and_more_slowly(world: FollowedServer) -> None:
    await asyncio.sleep(1.0)
    world.api.failures = [aiohttp.ClientError("refused")] * 1000
    _end(world)
    await asyncio.sleep(600.0)
    times = world.api.times["watch"]
    assert 15 <= len(times) <= 35


@in_world(FollowedServer, "Pod")
async def test_a_server_that_keeps_no_history_is_listed_more_and_more_slowly(world: FollowedServer) -> None:
    watch = world.api.before

    async def before(request: Request) -> None:
        await watch(request)
        if request.verb == "watch":
            raise failure(410, "too old")

    world.api.before = before  # type: ignore[method-assign]
    await asyncio.sleep(600.0)
    assert 15 <= len(world.api.times["list"]) <= 35 * 2  # each with a list of the jobs


@in_world(FollowedServer, "Pod")
async def test_jobs_that_were_deleted_during_an_interruption_are_dropped(world: FollowedServer) -> None:
    for name in "ab":
        job = {"kind": "GRPOJob", "metadata": {"namespace": "one", "name": name, "uid": f"{name}-1"}}
        world.mirror.keep_job(world.store.put(job))
    world.store.remove("GRPOJob", "one", "b")
    await asyncio.sleep(1.0)
    assert world.mirror.count()["GRPOJob"] == 2
    _end(world, aiohttp.ClientPayloadError("cut off"))
    await asyncio.sleep(10.0)
    assert [key.name for key in world.mirror.job_keys()] == ["a"]


@in_world(FollowedServer, "Pod")
async def test_a_list_that_expires_between_two_pages_is_begun_again(
    world: FollowedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    for name in ("x", "y", "z"):
        _put(world, name)
    world.api.compactions = 3
    await asyncio.sleep(0.1)
    assert not world.mirror.synced.is_set()
    await asyncio.sleep(60.0)
    assert world.mirror.synced.is_set()
    assert world.differences() == []
    assert len(world.api.times["list"]) == 2 * 4


@in_world(FollowedServer, "Pod")
async def test_after_an_expired_version_what_was_deleted_meanwhile_is_gone(world: FollowedServer) -> None:
    _put(world, "x")
    await asyncio.sleep(1.0)
    assert [pod.name for _, pod in world.mirror.pods(KEYS[0])] == ["x"]
    world.api.held_kinds.add("Pod")
    world.store.remove("Pod", "one", "x")
    world.store.compact()
    _end(world, failure(410, "too old"))
    await asyncio.sleep(1.0)
    assert world.mirror.pods(KEYS[0]) == []
    assert world.lists("expired") == 1


@pytest.mark.parametrize("answer", [failure(500, "no kind PodGroup is registered for version v1alpha2"), NO_RIGHT])
@in_world(FollowedServer, "Pod", "PodGroup")
async def test_an_optional_kind_that_is_served_but_not_listed_keeps_nothing_else_waiting(
    world: FollowedServer, answer: Exception
) -> None:
    gangs, pods = world.mirror.scope("PodGroup", "one"), world.mirror.scope("Pod", "one")
    world.api.refused = {"PodGroup": answer, "Pod": failure(500, "etcd is slow")}
    await asyncio.sleep(60.0)
    assert gangs.obstacle is not None
    assert pods.obstacle is None
    assert not world.mirror.synced.is_set(), "of pods nothing may be missing"
    del world.api.refused["Pod"]
    await asyncio.sleep(LAST_BACKOFF)
    assert world.mirror.synced.is_set()
    assert "PodGroup" in str(gangs.obstacle)
    age = world.instruments.registry.get_sample_value("grpo_operator_mirror_age_seconds", {"kind": "PodGroup"})
    assert age is not None, "an alert watches it"

    world.mirror.keep_job({"metadata": {"namespace": "one", "name": "a", "uid": "a-1", "resourceVersion": "1"}})
    world.woken.clear()
    world.api.refused.clear()
    await asyncio.sleep(LAST_BACKOFF)
    assert (gangs.is_listed, gangs.obstacle) == (True, None)
    assert world.woken == [Key("one", "a", "a-1")], "jobs that waited for it go on"


@pytest.mark.parametrize("answer", [TimeoutError(), failure(429, "busy"), failure(503, "starting")])
@in_world(FollowedServer, "Pod", "PodGroup")
async def test_an_api_server_that_is_away_or_busy_is_waited_for(world: FollowedServer, answer: Exception) -> None:
    world.api.refused = {"PodGroup": answer}
    await asyncio.sleep(60.0)
    assert not world.mirror.synced.is_set()
