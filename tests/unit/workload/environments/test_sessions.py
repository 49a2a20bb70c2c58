"""Tools and environments in their processes: as in TRL, what each failure is called, and that no process is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from grpo_devcluster.progress import wait_until
from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import EnvironmentLostError, EpisodeTimeoutError, ToolCall
from grpo_workload.environments.state import rebuild
from support.trainer import user_tools
from support.trainer.agents import COUNTER, USER, start

RANK = """
import asyncio, os, sys
from grpo_workload.environments.base import ToolCall
from support.trainer.agents import COUNTER, start

sessions = start(environments=[COUNTER])
sessions.ready()

async def hang():
    session = sessions.open({}, 1)
    await session.reset()
    await session.call([ToolCall(name="hang", arguments={"folder": sys.argv[1]})], 600)

asyncio.run(hang())
"""


@pytest.fixture(scope="module")
def sessions():
    limited = {"function": f"{USER}:fail", "memoryLimit": "500Mi", "timeoutSeconds": 3}
    passing = {"function": f"{USER}:give", "env": ["SEARCH_KEY"]}
    environ = os.environ | dict.fromkeys(("SEARCH_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), "sesame")
    found = start(
        "multiply",
        "add",
        "meet",
        limited,
        passing,
        environments=[COUNTER],
        wants_reward=True,
        wants_state=True,
        environ=environ,
    )
    try:
        found.ready()
        yield found
    finally:
        found.close()


@pytest.fixture
def own():
    """Start sessions that end with the test."""
    started = []

    def begin(*tools, **settings):
        started.append(start(*tools, **settings))
        started[-1].ready()
        return started[-1]

    yield begin
    for one in started:
        one.close()


async def act(sessions, *calls, seconds=60.0, seed=1, **row):
    """Return the results of one turn of a new episode."""
    session = sessions.open(row, seed)
    try:
        await session.reset()
        return await session.call([ToolCall(name=name, arguments=arguments) for name, arguments in calls], seconds)
    finally:
        await session.close()


async def text_of(sessions, name, **arguments):
    (result,) = await act(sessions, (name, arguments))
    assert not result.is_failed
    return result.content


async def ask(session, name, **arguments):
    return (await session.call([ToolCall(name=name, arguments=arguments)], 60))[0].content


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_schemas_are_those_of_trl(sessions):
    functions = [getattr(user_tools, name) for name in ("multiply", "add", "meet", "fail", "give")]
    methods = [getattr(user_tools.Counter, name) for name in ("append", "hang", "pid", "roll", "total")]
    assert sessions.schemas({}) == [get_json_schema(tool) for tool in functions + methods]


async def test_calls_of_a_turn_sync_async_and_the_policys_own_failures(sessions):
    results = await act(
        sessions,
        ("append", {"number": 4}),
        ("multiply", {"a": 6, "b": 7}),
        ("add", {"a": 1, "b": 2}),
        ("total", {}),
        ("divide", {}),
        ("multiply", {"a": 6}),
        ("multiply", None),
        ("fail", {"how": "raises"}),
        ("fail", {"how": "exits"}),
        ("fail", {"how": "memory"}),
        ("add", {"a": -1, "b": 2}),
        ("append", {"numbers": 4}),
        ("reset", {}),
    )
    assert [result.content for result in results[:4]] == ["[3, 4]", "42", "3", "7"]
    assert not any(result.is_failed for result in results[:4])
    assert [result.content for result in results[4:]] == [
        str({"error": text})
        for text in (
            "Tool divide not found.",
            "multiply() missing 1 required positional argument: 'b'",
            "The arguments of multiply must be a JSON object.",
            "'colour'",
            "bye",
            "MemoryError",
            "a must not be negative",
            "Counter.append() got an unexpected keyword argument 'numbers'",
            "Tool reset not found.",
        )
    ]
    assert all(result.is_failed for result in results[4:])


async def test_results_become_text_as_in_trl_and_long_ones_are_cut(sessions):
    kinds = ("none", "dict", "list", "blocks", "surrogate", "big")
    texts = [result.content for result in await act(sessions, *(("give", {"kind": kind}) for kind in kinds))]
    assert texts[:5] == ["None", "{'a': 1}", "[1, 'two']", "one two", "cut ?"]
    assert texts[5] == "x" * (1 << 20) + "\n[cut: the result has 1048581 letters]"


async def test_calls_of_tools_run_side_by_side(sessions, tmp_path):
    """Two that wait for each other, of one turn and of two episodes."""
    folder = str(tmp_path)
    meet = lambda name, other: ("meet", {"folder": folder, "name": name, "other": other})  # noqa: E731
    found = await asyncio.gather(act(sessions, meet("a", "b"), meet("b", "c")), act(sessions, meet("c", "a")))
    assert [result.content for results in found for result in results] == ["met"] * 3


async def test_an_environment_keeps_its_state_within_an_episode_alone(sessions):
    first, second = sessions.open({"level": 1}, 1), sessions.open({}, 2)
    assert (await first.reset()).startswith("Count on from 3, ")
    await second.reset()
    assert await ask(first, "append", number=4) == "[3, 4]"
    assert await ask(second, "append", number=9) == "[3, 9]"
    assert await ask(first, "append", number=5) == "[3, 4, 5]"
    pids = {await ask(session, "pid") for session in (first, second)}
    reward, state = await first.end()
    assert reward == 12.0
    found = rebuild(state)
    assert isinstance(found, user_tools.Counter)
    assert vars(found) == {"start": 3, "numbers": [3, 4, 5], "row": {"level": 1}}  # and no lock, which does not pickle
    assert (await second.end())[0] == 12.0
    for session in (first, second):
        await session.close()
    again = sessions.open({"how": "silent"}, 3)
    assert await again.reset() == ""
    assert await ask(again, "pid") in pids
    assert (await again.end())[0] == 3.0
    await again.close()


async def test_seeds_reproduce(sessions):
    async def episode(seed):
        session = sessions.open({}, seed)
        seen = [await session.reset()]
        for name, arguments in [("roll", {}), ("give", {"kind": "numbers"}), ("give", {"kind": "numbers"})]:
            seen.append(await ask(session, name, **arguments))
        await session.close()
        return seen

    large = (1 << 62) - 1
    first = await episode(large)
    assert await episode(large) == first
    assert not {*await episode(large - 1)} & {*first}
    assert len({*first}) == 4


@pytest.mark.parametrize(
    ("how", "cause", "message"),
    [
        (
            "connection",
            "connection",
            r"fail\]\.function: fail raised ConnectionResetError: the database is away \(.*:\d+",
        ),
        ("timeout", "connection", r"raised TimeoutError: the database is slow"),
        ("named", "connection", r"raised APIConnectionError: the service is away"),
        ("marked", "connection", r"raised OurServiceError: the service is down"),
        ("leaves", "process", r"tools\[.*:fail\]: its process ended with exit code 3 in fail"),
        ("killed", "process", r"its process was killed by SIGKILL \(probably the pod ran out of memory"),
        ("crashes", "process", r"(?s)was killed by SIGSEGV .* in fail; it was at\n.*user_tools.py\", line \d+ in fail"),
        ("nonsense", "process", r"sent an invalid reply in fail; its code must not write to file descriptors"),
        ("forged", "process", r"sent an invalid reply in fail"),
        (
            "hangs",
            "timeout",
            r"(?s)was not done in fail within 3 s: .* raise its timeoutSeconds; it was at\n.*user_tools.py\", line",
        ),
    ],
)
async def test_what_is_not_the_policys_fault_loses_the_episode(sessions, how, cause, message):
    with pytest.raises(EnvironmentLostError, match=message) as caught:
        await act(sessions, ("fail", {"how": how}), ("multiply", {"a": 2, "b": 3}))
    assert caught.value.cause == cause
    assert await text_of(sessions, "fail", how="nothing") == "nothing"


async def test_failures_of_an_environments_own_methods(sessions):
    for how, cause, message in [
        (
            "raises",
            "reset",
            r"environments\[counter\]\.factory: reset raised ValueError: no such level \(.*tools.py:\d+",
        ),
        ("away", "connection", r"reset raised ConnectionError: the game's server is away"),
        ("number", "reset", r"reset returned a int; return text, or None"),
    ]:
        with pytest.raises(EnvironmentLostError, match=message) as caught:
            await act(sessions, how=how)
        assert caught.value.cause == cause
    for how, message in [
        ("bad", r"get_reward returned 'good' \(str\), not a finite number"),
        ("unfair", r"get_reward raised ZeroDivisionError: no numbers"),
    ]:
        session = sessions.open({"how": how}, 1)
        await session.reset()
        with pytest.raises(EnvironmentLostError, match=message) as caught:
            await session.end()
        assert caught.value.cause == "get_reward"
        await session.close()


async def test_an_image_is_refused_by_name(sessions):
    with pytest.raises(ConfigError, match=r"tools\[.*:fail\]\.function: fail returned an image; only text"):
        await act(sessions, ("fail", {"how": "image"}))


async def test_credentials_are_not_visible_but_those_asked_for(sessions):
    names = await text_of(sessions, "give", kind="variables")
    assert "'SEARCH_KEY'" in names
    assert "'PATH'" in names
    assert "HF_TOKEN" not in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


async def test_an_environment_that_hangs_is_killed_with_what_it_started_while_others_go_on(sessions, tmp_path):
    stuck, other = sessions.open({}, 1), sessions.open({}, 2)
    await stuck.reset()
    await other.reset()
    with pytest.raises(EpisodeTimeoutError):
        await stuck.call([ToolCall(name="hang", arguments={"folder": str(tmp_path)})], 3)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not is_alive(pid), "its processes have ended", 10)
    assert await stuck.end() == (None, None)
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
        wait_until(lambda pid=pid: not is_alive(pid), "its processes have ended", 10)


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
    child = int(pids.read_text().split()[0])
    zygote = parent_of(child)
    rank.kill()
    rank.wait()
    wait_until(lambda: not is_alive(child) and not is_alive(zygote), "its processes have ended", 10)


async def test_several_environments_of_which_a_row_chooses_one(own):
    known = [{"name": "async", "factory": f"{USER}:AsyncCounter"}, {"name": "silent", "factory": f"{USER}:Silent"}]
    sessions = own(environments=known, wants_reward=True)
    names = [
        [schema["function"]["name"] for schema in sessions.schemas({"environment": name})]
        for name in ("async", "silent")
    ]
    assert names == [["same_loop"], ["look_around"]]
    for name, tool, seen, reward in [("async", "same_loop", "True", 0.5), ("silent", "look_around", "nothing", None)]:
        session = sessions.open({"environment": name}, 1)
        await session.reset()
        assert await ask(session, tool) == seen
        assert await session.end() == (reward, None)
        await session.close()
    with pytest.raises(ConfigError, match=r"`environment` of a row is 'chess'; it must be one of async, silent"):
        sessions.schemas({"environment": "chess"})
    with pytest.raises(ConfigError, match=r"a row has no column `environment`; it must be one of async, silent"):
        sessions.open({}, 1)


@pytest.mark.parametrize(
    ("tools", "environments", "message"),
    [
        (
            ["bare"],
            [],
            r"tools\[.*:bare\]\.function: bare cannot be .*: .*no docstring!; write a type hint for each arg",
        ),
        (["missing"], [], r"tools\[.*:missing\]\.function: .* has no missing; it has "),
        ([{"function": "no_such_module:f"}], [], r"tools\[no_such_module:f\]\.function: .* put it on PYTHONPATH"),
        (
            [],
            [{"name": "maze", "factory": f"{USER}:refuses", "params": {"start": 2}}],
            r"environments\[maze\]\.factory: .*:refuses with start raised ValueError: cannot begin at 2 \(.*tools.py",
        ),
        (
            [],
            [{"name": "maze", "factory": f"{USER}:Endless"}],
            r"makes a Endless, which has no method reset; write `def",
        ),
        (
            [{"function": f"{USER}:multiply", "env": ["NO_KEY"]}],
            [],
            r"tools\[.*\]\.env: NO_KEY is not set in the trainer",
        ),
        (
            [{"function": "user_pid:pid"}],
            [COUNTER],
            r"tools\[user_pid:pid\]\.function and environments\[counter\]\.factory: both have a tool pid",
        ),
        (
            [{"function": "writes_at_import:f"}],
            [],
            r"writes_at_import:f must not write to file descriptors that it did",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_field(tmp_path, monkeypatch, tools, environments, message):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "user_pid.py").write_text('def pid() -> int:\n    """Return a number."""\n    return 1\n')
    (tmp_path / "writes_at_import.py").write_text(
        "import os\nfor descriptor in range(3, 64):\n    try:\n        os.write(descriptor, b'nonsense\\n')\n"
        "    except OSError:\n        pass\n"
        'def f() -> int:\n    """Return a number."""\n    return 1\n'
    )
    with pytest.raises(ConfigError, match=message):
        start(*tools, environments=environments).ready()


def test_a_module_that_ends_or_hangs_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "leaves_at_import.py").write_text("import sys\nsys.exit(3)\n")
    begun = time.monotonic()
    message = r"its process ended with exit code 3 while it imported leaves_at_import:f"
    with pytest.raises(EnvironmentLostError, match=message):
        start({"function": "leaves_at_import:f"}).ready()
    (tmp_path / "hangs_at_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr("grpo_workload.environments.child_handle.IMPORT_SECONDS", 3 + time.monotonic() - begun)
    with pytest.raises(
        EnvironmentLostError, match=r"(?s)was not done while .*; it was at\n.*hangs_at_import.py"
    ) as caught:
        start({"function": "hangs_at_import:f"}).ready()
    assert caught.value.cause == "timeout"
