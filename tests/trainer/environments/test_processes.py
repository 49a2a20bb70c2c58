"""Processes of tools and environments that hang, are killed or are cancelled: others go on, and none is left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from grpo_devcluster.progress import wait_until
from grpo_workload.environments.base import EnvironmentLostError, EpisodeTimeoutError, ToolCall
from support.trainer.agents import COUNTER, act, ask, children_of, hanging_rank, is_alive, parent_of

RANK = hanging_rank("start(environments=[COUNTER])")


async def test_an_environment_that_hangs_is_killed_with_what_it_started_while_others_go_on(own, tmp_path):
    sessions = own(environments=[COUNTER | {"timeoutSeconds": 3}], wants_reward=True)
    stuck, other = sessions.open({}, 1), sessions.open({}, 2)
    await stuck.reset()
    await other.reset()
    with pytest.raises(EnvironmentLostError, match="was not done in hang within 3 s"):
        await stuck.call([ToolCall(name="hang", arguments={"folder": str(tmp_path)})], 60)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not is_alive(pid), "its processes have ended", 60)
    assert await ask(other, "append", number=4) == "[3, 4]"
    with pytest.raises(EpisodeTimeoutError):
        await other.call([ToolCall(name="pid", arguments={})], 0)
    assert (await other.end())[0] == 7.0  # nothing was killed
    await stuck.close()
    await other.close()


async def test_a_session_that_is_cancelled_leaves_no_process(sessions, tmp_path):
    session = sessions.open({}, 1)
    await session.reset()
    work = asyncio.ensure_future(ask(session, "hang", folder=str(tmp_path)))
    await asyncio.to_thread(wait_until, (tmp_path / "pids").exists, "the call hangs", 60)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await session.close()
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not is_alive(pid), "its processes have ended", 60)


async def test_processes_that_were_killed_are_replaced_and_none_is_left(own):
    sessions = own(environments=[COUNTER])
    first = sessions.open({}, 1)
    await first.reset()
    child = int(await ask(first, "pid"))
    zygote = parent_of(child)
    assert zygote in children_of(os.getpid())
    os.kill(child, signal.SIGKILL)
    with pytest.raises(EnvironmentLostError, match=r"environments\[counter\]: its process was killed by SIGKILL"):
        await ask(first, "pid")
    await first.close()
    second = sessions.open({}, 1)
    await second.reset()
    child = int(await ask(second, "pid"))
    assert child in children_of(zygote)
    os.kill(zygote, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not is_alive(child), "the child has ended with its zygote", 10)
    with pytest.raises(EnvironmentLostError, match=r"its process was killed by SIGKILL .* in pid") as caught:
        await ask(second, "pid")
    assert caught.value.cause == "process"
    await second.close()
    third = sessions.open({}, 1)
    await third.reset()
    child = int(await ask(third, "pid"))
    await third.close()
    sessions.close()
    assert not is_alive(child)
    assert zygote not in children_of(os.getpid())


async def test_calls_of_a_tool_wait_when_too_many_run(own, monkeypatch):
    monkeypatch.setattr("grpo_workload.environments.pool.MAX_TOOL_CHILDREN", 1)
    results = await act(own("give"), *[("give", {"kind": "pid"})] * 3)
    assert len({result.content for result in results}) == 1


def test_processes_end_with_their_rank(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    rank = subprocess.Popen(
        [sys.executable, tmp_path / "rank.py", tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pids = tmp_path / "pids"
    wait_until(pids.exists, "the call hangs", 60)
    found = [int(pid) for pid in pids.read_text().split()]
    found.append(parent_of(found[0]))
    rank.kill()
    rank.wait()
    wait_until(lambda: not any(map(is_alive, found)), "its processes have ended", 60)


async def test_many_episodes_may_begin_and_end_at_once(own):
    """Their requests do not fit into the socket of the process that forks: 300 do on Linux, and fewer here."""
    sessions = own(environments=[COUNTER])
    (pool,) = sessions._host.pools()
    pool._zygote.process.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    many = [sessions.open({}, seed) for seed in range(24)]
    assert all(await asyncio.gather(*(one.reset() for one in many)))
    pids = [int(await ask(one, "pid")) for one in many]
    for one in many:
        one._child.is_idle = False  # each is killed
        await one.close()
    await asyncio.sleep(0.5)  # the requests are sent by this loop
    wait_until(lambda: not any(map(is_alive, pids)), "its processes have ended", 30)
