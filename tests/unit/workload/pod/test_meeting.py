"""Pods of one engine meet over real sockets: in any order, those of one attempt alone; each notices an end at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from grpo_spec.contract import Contract, Engine, Follower
from grpo_workload.pod.contract_file import ThisPod
from grpo_workload.pod.meeting import Meeting, meeting
from support.trainer.launchers import free_ports
from support.trainer.places import contract_json

DEADLINE = 20.0


def an_engine() -> Engine:
    (port,) = free_ports(1)
    followers = (Follower(pod="gen-1", port=1), Follower(pod="gen-2", port=1))
    values: dict[str, Any] = {"name": "gen-0", "pod": "gen-0", "group": "gen", "host": "127.0.0.1", "port": 1}
    values |= {"devices": (0,)}
    return Engine(**values, followers=followers, meeting_port=port, pipeline_parallel=3)


def a_pod(name: str, attempt: int = 0) -> ThisPod:
    contract = Contract.model_validate(contract_json({"generation": {"topology": "Server"}}, attempt=attempt))
    return ThisPod(contract=contract, pod=name, pod_uid="", state_dir=Path(), termination_log=Path())


async def ranks(*meetings: Meeting) -> list[int]:
    async with asyncio.timeout(DEADLINE):
        nodes = [await one.node for one in meetings]
    assert len({one.master_port for one in nodes}) == 1
    return [one.rank for one in nodes]


def test_followers_may_come_first_and_an_end_is_noticed_by_all() -> None:
    async def run() -> None:
        engine = an_engine()
        async with AsyncExitStack() as first, AsyncExitStack() as others, AsyncExitStack() as last:
            one = await others.enter_async_context(meeting(a_pod("gen-1"), engine))
            leader = await first.enter_async_context(meeting(a_pod("gen-0"), engine))
            await asyncio.sleep(0.1)
            assert not leader.node.done(), "one is missing"
            two = await last.enter_async_context(meeting(a_pod("gen-2"), engine))
            assert await ranks(leader, one, two) == [0, 1, 2]
            await others.aclose()
            async with asyncio.timeout(DEADLINE):
                assert await leader.lost == "gen-1"
            assert not two.lost.done(), "the first pod tells it by ending"
            await first.aclose()
            async with asyncio.timeout(DEADLINE):
                assert await two.lost == "gen-0"

    asyncio.run(run())


def test_a_pod_that_comes_later_or_of_another_attempt_does_not_join() -> None:
    async def run() -> None:
        engine = an_engine()
        async with AsyncExitStack() as stack:
            leader = await stack.enter_async_context(meeting(a_pod("gen-0", attempt=1), engine))
            old = await stack.enter_async_context(meeting(a_pod("gen-1"), engine))
            pods = [await stack.enter_async_context(meeting(a_pod(f"gen-{rank}", 1), engine)) for rank in (1, 2)]
            assert await ranks(leader, *pods) == [0, 1, 2]
            assert not old.node.done()
            late = await stack.enter_async_context(meeting(a_pod("gen-2", 1), engine))
            async with asyncio.timeout(DEADLINE):
                assert await leader.lost == "gen-2", "there is another pod in its place"
            assert not late.node.done()

    asyncio.run(run())


def test_one_that_leaves_before_all_are_here_may_come_again() -> None:
    async def run() -> None:
        engine = an_engine()
        async with AsyncExitStack() as stack:
            leader = await stack.enter_async_context(meeting(a_pod("gen-0"), engine))
            async with meeting(a_pod("gen-1"), engine):
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(leader.node), 0.3)
            pods = [await stack.enter_async_context(meeting(a_pod(f"gen-{rank}"), engine)) for rank in (2, 1)]
            assert await ranks(leader, *pods) == [0, 2, 1]
            assert not leader.lost.done()

    asyncio.run(run())
