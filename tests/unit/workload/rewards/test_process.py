"""Users' reward functions in their process: arguments and results, messages of failures, and what they cannot reach."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_devcluster.progress import wait_until
from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Episode
from grpo_workload.environments.state import snapshot
from grpo_workload.rewards.scorer import RewardError
from grpo_workload.rewards.scoring import build_rewards, close_rewards, score, take_logged, wants_environments
from grpo_workload.rewards.trl_signature import Logged, TrainerState
from support.trainer.reward_inputs import make_completion, make_config, make_prompt, make_source
from support.trainer.user_rewards import Game

USER = "support.trainer.user_rewards"

# Without capabilities, as in a container: root may read everything.
UNPRIVILEGED = """
import ctypes, subprocess, sys
from grpo_spec.rewards import RewardConfig
from grpo_workload.rewards.process import RewardProcess

libc = ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
control = "from support.trainer.user_rewards import spies; print('a child without limits:', spies(['']))"
subprocess.run([sys.executable, "-c", control], check=True)
for name in ("spies", "moves"):
    process = RewardProcess(RewardConfig(name="spy", function="support.trainer.user_rewards:" + name), {})
    process.ready()
    print(name + ":", process.call({"prompts": [""], "completions": [""], "folder": [sys.argv[1]]}, 60), flush=True)
    process.close()
"""

RANK = """
import sys
from grpo_spec.rewards import RewardConfig
from grpo_workload.rewards.process import RewardProcess

process = RewardProcess(RewardConfig(name="stuck", function="support.trainer.user_rewards:stuck"), {})
process.ready()
process.call({"prompts": ["a"], "completions": ["b"], "folder": [sys.argv[1]]}, 600)
"""


async def run(function, prompts=None, completions=None, calls=1, logs=None, kind="function", seed=0, **settings):
    prompts = prompts or [make_prompt()] * 2
    rewards = build_rewards([make_config(**{kind: function}, **settings)], make_source(prompts[0].columns))
    try:
        answers, state = completions or [make_completion()] * 2, TrainerState(global_step=3, max_steps=9)
        tables = [await score(rewards, prompts, answers, state=state, seed=seed) for _ in range(calls)]
        if logs is not None:
            logs.update(take_logged(rewards))
        return tables[-1]
    finally:
        close_rewards(rewards)


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("2 + 2?", ["4", "5"]),
        ([{"role": "user", "content": "2 + 2?"}], [[{"role": "assistant", "content": text}] for text in "45"]),
    ],
)
async def test_a_function_is_called_as_trl_does(tmp_path, text, completions):
    folder = str(tmp_path)
    levels = {4: "easy", 5: "hard"}
    prompts = [make_prompt(text, answer=answer, level=level, folder=folder) for answer, level in levels.items()]
    answers = [make_completion("4", token_ids=(1, 2, 3)), make_completion("5", token_ids=(4,))]
    logs = {}
    table = await run(f"{USER}:shorter", prompts, answers, logs=logs)
    assert table.values == [[-3.0, -1.0]]
    assert logs == {"mine": Logged(2, {"tokens": [3.0, 1.0]}, {"first": [1, 4]})}
    assert json.loads((tmp_path / "seen").read_text()) == {
        "prompts": [text, text],
        "completions": completions,
        "completion_ids": [[1, 2, 3], [4]],
        "answer": [4, 5],
        "level": ["easy", "hard"],
        "folder": [folder] * 2,
        "state": [3, 9],
    }


async def test_params_are_arguments_of_each_call_or_of_the_factory():
    answers = [make_completion(token_ids=(1,) * length) for length in (2, 4)]
    prompts = [make_prompt()] * 2
    assert (await run(f"{USER}:bounded", prompts, answers, params={"limit": 3})).values == [[1.0, 0.0]]
    factory = {"kind": "factory", "params": {"limit": 4, "scale": 0.5}}
    assert (await run(f"{USER}:Longest", prompts, answers, calls=2, **factory)).values == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("factory", "params", "message"),
    [
        ("Longest", {}, r"rewards\[mine\]\.factory: .*:Longest with no params raised TypeError: .*'limit'"),
        ("Longest", {"limit": -1}, r"with limit raised ValueError: limit must be positive \(.*user_rewards.py:\d+\)"),
        ("os:getcwd", {}, r"os:getcwd returned a str, not a function; a reward itself is a `function`"),
    ],
)
async def test_a_factory_that_fails_is_named_with_its_params(factory, params, message):
    path = factory if ":" in factory else f"{USER}:{factory}"
    with pytest.raises(ConfigError, match=message):
        await run(path, kind="factory", params=params)


async def test_async_functions_keep_their_event_loop_between_calls():
    assert (await run(f"{USER}:keeps_its_loop", calls=3)).values == [[1.0, 1.0]]


async def test_an_object_with_an_async_call_is_accepted():
    assert (await run(f"{USER}:callable_object")).values == [[None, None]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("huge", r"rewards\[mine\] returned inf for completion 1 of 2, an answer to prompt 0 of the dataset"),
        ("reads_too_far", r"rewards\[mine\] raised EOFError: .* \(.*user_rewards.py:\d+\)"),
        ("gives_up_late", r"rewards\[mine\] raised KeyError: 'colour' \(.*user_rewards.py:\d+\)"),
        ("is_cancelled", r"rewards\[mine\] raised CancelledError: "),
        ("logs_under_a_tuple", r"log_extra: the name of a column is a text, not \('a', 'b'\)"),
        ("infinite", r"rewards\[mine\] returned inf for completion 0 of 2, an answer to prompt 0 of the dataset"),
        ("divides", r"rewards\[mine\] returned nan for completion 1 of 2, .* or None where the reward does not apply"),
        ("logs_too_little", r"log_extra: column 'note' has 1 value for 2 completions \(.*user_rewards.py:\d+\)"),
        ("logs_a_reserved_name", r"log_metric: the name 'mean' cannot be used"),
        ("exits", r"rewards\[mine\] raised SystemExit: 0"),
        ("times_out_itself", r"rewards\[mine\] raised TimeoutError: no answer from the judge"),
        (
            "hangs",
            r"rewards\[mine\] was not done with 2 completions within 1 s: .* raise its timeoutSeconds; it was in hangs "
            r"\(.*user_rewards.py:\d+\)",
        ),
        ("hangs_too", r"rewards\[mine\] was not done with 2 completions within 1 s"),
        ("backtracks", r"rewards\[mine\] was not done .*; it was in backtracks \(.*user_rewards.py:\d+\)\n  File"),
        ("fails", r"rewards\[mine\] raised KeyError: 'colour' \(.*user_rewards.py:\d+\)"),
        (
            "takes_all",
            r"rewards\[mine\] ran out of memory \(.*user_rewards.py:\d+\); its memoryLimit is 300Mi: raise it, or use "
            r"less memory",
        ),
        (
            "crashes",
            r"rewards\[mine\]: its process was killed by SIGSEGV .* with 2 completions; it was in crashes "
            r"\(.*user_rewards.py:\d+\)",
        ),
        ("leaves", r"rewards\[mine\]: its process ended with exit code 0 with 2 completions"),
        ("is_killed", r"rewards\[mine\]: its process was killed by SIGKILL \(probably the pod ran out of memory"),
        ("talks_nonsense", r"rewards\[mine\]: its process sent an invalid reply"),
        (
            "asks_the_judge",
            r"KeyError: 'JUDGE_API_KEY'; JUDGE_API_KEY is set in the pod; add it to the reward's `env` to",
        ),
    ],
)
async def test_a_failure_of_a_function_names_the_reward_and_the_cause(monkeypatch, function, message):
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    with pytest.raises(RewardError, match=message):
        await run(f"{USER}:{function}", timeoutSeconds=1 if "not done" in message else 60, memoryLimit="300Mi")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_short", r"rewards\[mine\] returned 1 value for 2 completions; write `return \[score\(text\) for text in"),
        ("letters", r"rewards\[mine\] returned '11' \(str\), not a list; write `return"),
        ("words", r"returned 'good' \(str\) for completion 1 of 2, an answer to prompt 0 of the dataset; write `ret"),
    ],
)
async def test_what_is_no_number_ends_the_job_at_the_first_call_alone(function, message):
    """The same code would return it on every attempt; later, a rare row may be to blame."""
    with pytest.raises(ConfigError, match=message):
        await run(f"{USER}:{function}")
    with pytest.raises(RewardError, match=message):
        await run(f"{USER}:at_second", calls=2, params={"other": function})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"function": f"{USER}:of_two"},
            r"rewards\[mine\]\.function: .*:of_two does not take the arguments of its calls: got an unexpected keyword "
            r"argument 'completion_ids'\. .* and the columns answer, level\. Write `def of_two\(prompts, completions, "
            r"\*\*columns\)`",
        ),
        ({"function": f"{USER}:spies_on"}, r"missing a required argument: 'folder'"),
        ({"factory": f"{USER}:makes_of_two"}, r"\[mine\]\.factory: .*:makes_of_two does not take .*\(prompts, comp"),
        ({"function": f"{USER}:bounded", "params": {"level": 1}}, r"level in `params` has the name of a column of the"),
    ],
)
async def test_a_function_that_cannot_take_its_arguments_is_refused_before_anything_is_sampled(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_rewards([make_config(**settings)], make_source({"answer": 4, "level": "easy"}))


async def test_a_function_that_names_environments_gets_them_as_they_were_at_the_end_and_sees_no_lost_one():
    def acted(total, lost=None):
        state = None if total is None else snapshot(Game(total))[0]
        episode = Episode(messages=({"role": "assistant", "content": str(total)},), state=state, lost=lost)
        return replace(make_completion(), episode=episode)

    completions = [acted(3), acted(9, "process"), acted(None), acted(5)]
    games, other = make_config(function=f"{USER}:reads_games"), {"function": f"{USER}:bounded", "params": {"limit": 5}}
    rewards = build_rewards([games, make_config("other", **other)], make_source({}), has_environments=True)
    try:
        assert wants_environments(rewards)
        assert not wants_environments(rewards[1:])
        table = await score(rewards, [make_prompt()] * 4, completions)
        logged = take_logged(rewards)["mine"]
    finally:
        close_rewards(rewards)
    assert table.values[0] == [3, None, None, 5]
    assert table.values[1][1] is None
    assert logged.extra == {"seen": ["3", "None", "5"]}
    assert logged.spread([True, False, True, True]).extra == {"seen": ["3", None, "None", "5"]}


class WhoReads:
    """Becomes the number of the process that unpickles it; other code of a model might do anything there."""

    def __reduce__(self):
        return os.getpid, ()


async def test_what_an_environment_left_is_unpickled_in_the_rewards_process_alone():
    episode = Episode(messages=({"role": "assistant", "content": ""},), state=snapshot(Game(WhoReads()))[0])
    rewards = build_rewards([make_config(function=f"{USER}:reads_games")], make_source({}), has_environments=True)
    try:
        table = await score(rewards, [make_prompt()], [replace(make_completion(), episode=episode)])
    finally:
        close_rewards(rewards)
    (reader,) = table.values[0]
    assert reader not in (None, os.getpid())


def test_a_function_that_names_environments_is_refused_in_a_job_without():
    with pytest.raises(ConfigError, match=r"reads_games does not take .*environments is passed in jobs with spec.env"):
        build_rewards([make_config(function=f"{USER}:reads_games")], make_source({}))


async def test_a_function_that_runs_is_checked_with_the_columns_of_an_evaluation_too():
    rewards = build_rewards([make_config(function=f"{USER}:spies_on")], make_source({"folder": ""}))
    with pytest.raises(ConfigError, match=r"missing a required argument: 'folder'"):
        build_rewards([reward.config for reward in rewards], make_source({"answer": 4}), running=rewards)


async def test_random_numbers_depend_on_the_seed_alone():
    """A run that resumes draws what it would have drawn; another step, and another reward, draw others."""
    first, again, other = [
        (await run(f"{USER}:draws", calls=calls, seed=seed)).values for calls, seed in [(1, 5), (2, 5), (1, 6)]
    ]
    assert first == again
    assert len({*first[0], *other[0], *(await run(f"{USER}:draws", seed=5, name="yours")).values[0]}) == 6


async def test_a_function_gets_only_the_credentials_in_its_env(monkeypatch, tmp_path):
    for name in ("JUDGE_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("RANK", "3")
    assert (await run(f"{USER}:asks_the_judge", env=["JUDGE_API_KEY"])).values == [[1.0, 1.0]]
    await run(f"{USER}:names", [make_prompt(folder=str(tmp_path))], [make_completion()], env=["JUDGE_API_KEY"])
    seen = set(json.loads((tmp_path / "names").read_text()))
    assert {"PATH", "RANK", "JUDGE_API_KEY"} <= seen
    assert {name for name in seen if os.environ.get(name) == "sesame"} == {"JUDGE_API_KEY"}
    said = r"rewards\[mine\]\.env: NO_SUCH_KEY is not set in the pods that run it; set it in their podTemplate.env"
    with pytest.raises(ValueError, match=said):
        await run(f"{USER}:names", env=["NO_SUCH_KEY"])


@pytest.mark.skipif(
    ctypes.CDLL(None).syscall(444, None, 0, 1) < 2,
    reason="this kernel lacks Landlock version 2; the rank logs a warning there",
)
def test_a_function_cannot_read_variables_or_memory_of_its_rank(tmp_path):
    (tmp_path / "rank.py").write_text(UNPRIVILEGED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, tmp_path / "rank.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert done.stdout.splitlines() == ["a child without limits: [3.0]", "spies: [0.0]", "moves: [1.0]"], done.stderr


def wait_for_the_end(pid: Path) -> None:
    """Wait until the process that a function noted has ended."""
    stat = Path("/proc", pid.read_text(), "stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", "the process has ended", 60)


async def test_processes_that_a_function_started_end_with_it(tmp_path):
    with pytest.raises(RewardError, match=r"was not done with 1 completion within 1 s"):
        await run(f"{USER}:starts_others", [make_prompt(folder=str(tmp_path))], [make_completion()], timeoutSeconds=1)
    wait_for_the_end(tmp_path / "pid")


async def test_a_column_that_does_not_pickle_is_named():
    said = r"rewards\[mine\]: column lock cannot be sent to the reward's process .* remove it"
    with pytest.raises(RewardError, match=said):
        await run(f"{USER}:shorter", [make_prompt(lock=threading.Lock())], [make_completion()])


def test_a_stuck_function_ends_with_its_rank(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    rank = subprocess.Popen([sys.executable, tmp_path / "rank.py", tmp_path], env=environ)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the function runs", 60)
    assert Path("/proc", (tmp_path / "pid").read_text()).exists()
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    wait_for_the_end(tmp_path / "pid")
