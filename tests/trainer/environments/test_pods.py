"""Sessions on environment pods: real processes, real sockets. They act as those beside the rank do."""

import asyncio
import os
import re
import resource
import subprocess
import sys
from contextlib import closing

import pytest

from grpo_devcluster.progress import wait_until
from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import EnvironmentLostError, EpisodeTimeoutError, ToolCall
from support.trainer.agents import COUNTER, USER, act, ask, hanging_rank, is_alive, make_config, start
from support.trainer.environment_pods import EnvironmentPod, connect

TOOLS = ("multiply", "add", "meet", "give", {"function": f"{USER}:fail", "timeoutSeconds": 3, "memoryLimit": "500Mi"})
CONFIG = make_config(*TOOLS, environments=[COUNTER])
SMALL = make_config("add", environments=[COUNTER])
WANTS = {"wants_reward": True, "wants_state": True}
SESSIONS = 64


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """Two pods that no test harms."""
    found = [EnvironmentPod(tmp_path_factory.mktemp("pod"), CONFIG, sessions=SESSIONS) for _ in range(2)]
    try:
        for pod in found:
            pod.wait_until_ready()
        yield found
    finally:
        for pod in found:
            pod.stop()


@pytest.fixture
def rank(pods):
    """Connect a rank to these pods, or to others."""
    connected = []

    def begin(*addresses, config=CONFIG, **settings):
        connected.append(connect(config, *(addresses or [pod.address for pod in pods]), **settings))
        connected[-1].ready()
        return connected[-1]

    yield begin
    for one in connected:
        one.close()


@pytest.fixture
def own(tmp_path):
    """Start pods that end with the test."""
    found = []

    def begin(config=SMALL, **settings):
        found.append(EnvironmentPod(tmp_path / f"pod{len(found)}", config, **settings))
        return found[-1]

    yield begin
    for pod in found:
        pod.kill()


async def episode(sessions, seed=(1 << 62) - 1):
    """Play one with all kinds of results, and return what it says and is."""
    session = sessions.open({"level": 1, "prompt": [{"role": "user", "content": "é"}]}, seed)
    seen = [await session.reset()]
    kinds = ("none", "blocks", "surrogate", "big", "huge", "numbers")
    calls = [ToolCall(name="give", arguments={"kind": kind}) for kind in kinds]
    calls += [ToolCall(name="append", arguments={"number": 4}), ToolCall(name="roll", arguments={})]
    calls += [ToolCall(name="fail", arguments={"how": "raises"}), ToolCall(name="nothing", arguments=None)]
    seen += await session.call(calls, 60)
    seen += await session.call([ToolCall(name="roll", arguments={})], 60)
    seen.append(await session.end())
    await session.close()
    return seen


async def test_an_episode_says_and_is_the_same_as_beside_the_rank(rank):
    with closing(start(*TOOLS, environments=[COUNTER], **WANTS)) as local:
        local.ready()
        sessions = rank(**WANTS)
        assert sessions.schemas == local.schemas
        found = await episode(local)
        assert await episode(sessions) == found
        assert found[5].content.endswith("[cut: the result has 10000000 letters]")
        assert (await episode(sessions, 1))[0] != found[0]


async def test_a_turns_calls_run_side_by_side_and_end_with_the_episodes_seconds(rank, tmp_path):
    sessions, folder = rank(), str(tmp_path)
    meet = lambda name, other: ("meet", {"folder": folder, "name": name, "other": other})  # noqa: E731
    found = await asyncio.gather(act(sessions, meet("a", "b"), meet("b", "c")), act(sessions, meet("c", "a")))
    assert [result.content for results in found for result in results] == ["met"] * 3
    with pytest.raises(EpisodeTimeoutError):
        await act(sessions, ("add", {"a": 1, "b": 2}), seconds=0)


async def test_what_is_lost_or_refused_in_a_pod_says_so_as_beside_the_rank(rank, pods):
    sessions = rank()
    for how, cause, message in [
        ("connection", "connection", r"fail raised ConnectionResetError: the database is away .*on 127.0.0.1:"),
        ("killed", "process", r"tools\[.*fail\]: its process was killed by SIGKILL"),
        ("hangs", "timeout", r"was not done in fail within 3 s: does it wait"),
    ]:
        with pytest.raises(EnvironmentLostError, match=f"(?s){message}") as caught:
            await act(sessions, ("fail", {"how": how}))
        assert caught.value.cause == cause
    with pytest.raises(ConfigError, match=r"tools\[.*fail\]\.function: fail returned an image; only text"):
        await act(sessions, ("fail", {"how": "image"}))
    with pytest.raises(EnvironmentLostError, match=r"reset raised ValueError: no such level") as caught:
        await act(sessions, how="raises")
    assert caught.value.cause == "reset"
    assert (await act(sessions, ("add", {"a": 1, "b": 2})))[0].content == "3", "no pod is avoided for it"


async def test_a_hundred_sessions_at_once_spread_over_the_pods(rank, pods):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, hard))  # many systems begin with fewer than there are episodes
    sessions = rank(**WANTS)
    many = [sessions.open({"level": number}, number) for number in range(100)]
    assert len(set(await asyncio.gather(*(one.reset() for one in many)))) == 100
    assert sorted(one._pod.address for one in many) == sorted(50 * [pod.address for pod in pods])
    pids = await asyncio.gather(*(ask(one, "pid") for one in many))
    assert len(set(pids)) == 100
    assert [reward for reward, _ in await asyncio.gather(*(one.end() for one in many))] == [3.0] * 100
    await asyncio.gather(*(one.close() for one in many))
    assert {pod.num_open for pod in sessions._host._pods} == {0}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_full_pod_makes_episodes_wait_and_says_for_how_long(rank, own, monkeypatch, caplog):
    small = [own(sessions=1) for _ in range(2)]
    for pod in small:
        pod.wait_until_ready()
    addresses = [pod.address for pod in small]
    counts: list[int] = []
    mine = rank(*addresses, config=SMALL, sessions=1, rank=0, on_wait=counts.append)
    other = rank(*addresses, config=SMALL, sessions=1, rank=1)
    held = [mine.open({}, 1), other.open({}, 1)]
    for session in held:
        await session.reset()
    assert {session._pod.address for session in held} == {*addresses}
    assert all(session.wait_seconds < 1 for session in held)
    waiting = [asyncio.ensure_future(act(sessions, ("add", {"a": 1, "b": 2}))) for sessions in (mine, mine, other)]
    late = mine.open({}, 2)
    waiting.append(asyncio.ensure_future(late.reset()))
    done, _ = await asyncio.wait(waiting, timeout=1.5)
    assert not done
    assert counts == [1, 2, 3]
    await held.pop().close()
    await waiting.pop()
    assert late.wait_seconds >= 1.5
    await late.close()
    assert [results[0].content for results in await asyncio.gather(*waiting)] == ["3"] * 3
    assert (max(counts), counts[-1]) == (3, 0)
    monkeypatch.setattr("grpo_workload.environments.pods.host.FULL_SECONDS", 1.0)
    monkeypatch.setattr("grpo_workload.environments.pods.host._TELL_SECONDS", 0.5)
    held.append(other.open({}, 1))
    await held[-1].reset()
    message = r"environmentPods.groups\[games\]: no session became free for \d.* s; 2 pods have 2. Raise `replicas`, or"
    with pytest.raises(EnvironmentLostError, match=message):
        await act(other, ("add", {"a": 1, "b": 2}))
    assert "Raise `replicas`" in caplog.text
    assert "; episodes wait" in caplog.text
    for session in held:
        await session.close()


RANK = hanging_rank('connect(make_config("add", environments=[COUNTER]), sys.argv[2], sessions=1)')


async def test_a_rank_that_vanishes_frees_its_session_and_what_it_does(rank, own, tmp_path):
    pod = own(sessions=1)
    (tmp_path / "rank.py").write_text(RANK)
    pod.wait_until_ready()
    process = subprocess.Popen(  # noqa: ASYNC220  # it does not block
        [sys.executable, tmp_path / "rank.py", tmp_path, pod.address],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pids = tmp_path / "pids"
    await asyncio.to_thread(wait_until, pids.exists, "the call hangs", 60)
    process.kill()
    process.wait()
    await asyncio.to_thread(
        wait_until, lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), "its processes end", 10
    )
    sessions = rank(pod.address, config=SMALL, sessions=1)
    assert (await act(sessions, ("total", {})))[0].content == "3"


async def test_a_pod_that_is_killed_in_a_call_loses_it_and_another_pod_begins_in_the_same_state(rank, own, tmp_path):
    mine = {pod.address: pod for pod in (own(), own())}
    for pod in mine.values():
        pod.wait_until_ready()
    sessions = rank(*mine, config=SMALL, **WANTS)
    first = sessions.open({}, 7)
    observation = await first.reset()
    rolled = await ask(first, "roll")
    work = asyncio.ensure_future(ask(first, "hang", folder=str(tmp_path)))
    await asyncio.to_thread(wait_until, (tmp_path / "pids").exists, "the call hangs", 60)
    killed = first._pod.address
    mine[killed].kill()
    message = rf"environmentPods.groups\[games\]: {killed} was lost in a call: it "
    with pytest.raises(EnvironmentLostError, match=message) as caught:
        await work
    assert caught.value.cause == "connection"
    await first.close()
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not is_alive(int(pid)), "its processes end with it", 60)
    for _ in range(2):
        again = sessions.open({}, 7)
        assert await again.reset() == observation
        assert await ask(again, "roll") == rolled
        assert again._pod.address != killed
        await again.close()


async def test_episodes_wait_for_the_only_pod_to_begin_again(rank, own):
    pod = own()
    pod.wait_until_ready()
    counts: list[int] = []
    sessions = rank(pod.address, config=SMALL, on_wait=counts.append)
    assert (await act(sessions, ("add", {"a": 1, "b": 2})))[0].content == "3"
    pod.kill()
    waiting = asyncio.ensure_future(act(sessions, ("add", {"a": 1, "b": 2})))
    await asyncio.to_thread(wait_until, lambda: counts == [1], "the episode waits", 10)
    assert not waiting.done()
    pod.start()
    assert (await waiting)[0].content == "3"


async def test_a_pod_that_is_stopped_ends_its_sessions_and_processes_at_once(rank, own):
    pod = own()
    pod.wait_until_ready()
    sessions = rank(pod.address, config=SMALL)
    session = sessions.open({}, 1)
    await session.reset()
    pid = int(await ask(session, "pid"))
    code, seconds = await asyncio.to_thread(pod.stop)
    assert (code, is_alive(pid)) == (0, False)
    assert seconds < 10
    with pytest.raises(EnvironmentLostError, match=r"was lost in a call: it ended the connection \(code 1001\)"):
        await ask(session, "pid")
    await session.close()


def test_mistakes_of_users_reach_the_rank_with_their_field_and_stay_in_the_pod(own):
    config = make_config("missing")
    pod = own(config)
    sessions = connect(config, pod.address)
    with pytest.raises(ConfigError, match=r"tools\[.*:missing\]\.function: .* has no missing; it has "):
        sessions.ready()
    status, text = pod.ready()
    assert status == 503
    assert re.match(r"is refused: tools\[.*:missing\]\.function", text)
    assert re.search(r"ERROR .* tools\[.*:missing\]\.function: .* has no missing", pod.log())
    assert pod.stop()[0] == 64
    assert '"reason":"ConfigError"' in pod.termination_message()
    message = pod.termination_message()
    assert "has no missing; it has" in message
    assert "(for environment pods, podTemplate of their group holds, and spec.podTemplate does not)" in message


def test_a_module_that_ends_its_process_is_a_failure_that_may_pass(own, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr("grpo_workload.environments.pods.describe.START_SECONDS", 20.0)
    (tmp_path / "leaves_at_import.py").write_text("import sys\nsys.exit(3)\n")
    config = make_config({"function": "leaves_at_import:f"})
    pod = own(config)
    sessions = connect(config, pod.address)
    message = r"environmentPods.groups\[games\]: 0 of 1 pod could be used for .* its process ended with exit code 3"
    with pytest.raises(EnvironmentLostError, match=message):
        sessions.ready()
    assert pod.stop()[0] == 74


def test_a_reward_that_no_environment_has_is_refused_by_the_rank(own):
    config = make_config(environments=[{"name": "silent", "factory": f"{USER}:Silent"}])
    sessions = connect(config, own(config).address, wants_reward=True)
    with pytest.raises(ConfigError, match=r"environments\[silent\]\.factory: a reward is `environment`, and no"):
        sessions.ready()


async def test_groups_serve_environments_and_all_tools(rank, own):
    known = [{"name": "async", "factory": f"{USER}:AsyncCounter"}, {"name": "silent", "factory": f"{USER}:Silent"}]
    config = make_config("add", environments=known)
    mine = [own(config.model_copy(update={"environments": (one,)})) for one in config.environments]
    for pod in mine:
        pod.wait_until_ready()
    groups = [
        {"name": one["name"], "sessions": 4, "environments": [one["name"]], "addresses": [pod.address]}
        for one, pod in zip(known, mine, strict=True)
    ]
    sessions = rank(config=config, groups=groups, wants_reward=True)
    for name, tool, seen, reward in [("async", "same_loop", "True", 0.5), ("silent", "look_around", "nothing", None)]:
        session = sessions.open({"environment": name}, 1)
        await session.reset()
        assert await ask(session, tool) == seen
        assert await ask(session, "add", a=1, b=2) == "3"
        assert await session.end() == (reward, None)
        await session.close()


def test_pods_of_other_code_than_the_first_groups_are_refused(own):
    mine = [own(SMALL), own(make_config("multiply", environments=[COUNTER]))]
    groups = [{"name": name, "sessions": 4, "addresses": [pod.address]} for name, pod in zip("ab", mine, strict=True)]
    sessions = connect(SMALL, groups=groups)
    with pytest.raises(ConfigError, match=r"environmentPods.groups\[b\]: its tools or environments have other names"):
        sessions.ready()
