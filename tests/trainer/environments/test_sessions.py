"""Tools and environments of users get and return in their processes the same as in TRL."""

import asyncio

import pytest
from transformers.utils import get_json_schema

from grpo_spec.errors import ConfigError
from grpo_workload.environments.state import rebuild
from support.trainer import user_tools
from support.trainer.agents import USER, act, ask


def test_schemas_are_those_of_trl(sessions):
    functions = [getattr(user_tools, name) for name in ("multiply", "add", "meet", "fail", "give")]
    methods = [getattr(user_tools.Counter, name) for name in ("append", "hang", "pid", "roll", "total")]
    assert sessions.schemas.of({}) == [get_json_schema(tool) for tool in functions + methods]


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


async def test_credentials_are_not_visible_but_those_asked_for(sessions):
    names = (await act(sessions, ("give", {"kind": "variables"})))[0].content
    assert "'SEARCH_KEY'" in names
    assert "'PATH'" in names
    assert "HF_TOKEN" not in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


async def test_several_environments_of_which_a_row_chooses_one(own):
    known = [{"name": "async", "factory": f"{USER}:AsyncCounter"}, {"name": "silent", "factory": f"{USER}:Silent"}]
    sessions = own(environments=known, wants_reward=True)
    names = [
        [schema["function"]["name"] for schema in sessions.schemas.of({"environment": name})]
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
        sessions.open({"environment": "chess"}, 1)
    with pytest.raises(ConfigError, match=r"`environment` of a row is \['async'\]; it must be one of async, silent"):
        sessions.open({"environment": ["async"]}, 1)
    with pytest.raises(ConfigError, match=r"a row has no column `environment`; it must be one of async, silent"):
        sessions.open({}, 1)
