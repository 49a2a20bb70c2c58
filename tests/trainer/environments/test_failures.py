"""Each failure of a tool or an environment has its cause, and mistakes are refused at once."""

import sys
import time

import pytest

from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import EnvironmentLostError
from support.trainer.agents import COUNTER, USER, act, start


async def text_of(sessions, name, **arguments):
    (result,) = await act(sessions, (name, arguments))
    assert not result.is_failed
    return result.content


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
        ("crashes", "process", r"was killed by SIGSEGV .* in fail; it was in fail \(.*user_tools.py:\d+\)"),
        ("nonsense", "process", r"sent an invalid reply in fail; its code must not write to file descriptors"),
        ("forged", "process", r"sent an invalid reply in fail"),
        (
            "hangs",
            "timeout",
            r"was not done in fail within 3 s: .* raise its timeoutSeconds; it was in fail \(.*user_tools.py:\d+\)",
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


async def test_a_reset_that_does_not_take_the_rows_columns_is_refused(own, tmp_path, monkeypatch):
    """It would never succeed: no episode is begun again, or lost, for it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    text = "class Game:\n    def reset(self, prompt, word):\n        raise TypeError(word)\n"
    (tmp_path / "user_strict.py").write_text(text)
    sessions = own(environments=[{"name": "game", "factory": "user_strict:Game"}])
    message = (
        r"environments\[game\]\.factory: reset .* 'word'. A row has prompt, answer; write `def reset\(self, \*\*row"
    )
    with pytest.raises(ConfigError, match=message):
        await act(sessions, prompt=[], answer="a")
    with pytest.raises(EnvironmentLostError, match="reset raised TypeError: this"):
        await act(sessions, prompt=[], word="this")


async def test_an_image_is_refused_by_name(sessions):
    with pytest.raises(ConfigError, match=r"tools\[.*:fail\]\.function: fail returned an image; only text"):
        await act(sessions, ("fail", {"how": "image"}))


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
            r"tools\[.*\]\.env: NO_KEY is not set in the pods that run it",
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
        EnvironmentLostError, match=r"was not done while .*; it was in <module> \(.*hangs_at_import.py:2\)"
    ) as caught:
        start({"function": "hangs_at_import:f"}).ready()
    assert caught.value.cause == "timeout"
