import asyncio
import dataclasses
import math
import subprocess
import sys
import threading

import pytest

from grpo_workload.inputs import RewardConfig
from grpo_workload.ranks import describe_error
from grpo_workload.rewards import Reward, RewardError, RewardTable, build_rewards, score
from grpo_workload.tasks import PromptSource
from grpo_workload.types import Completion, Prompt

USER_CODE = """
import asyncio
import threading

started = asyncio.Event()
seen = {}
NOT_A_FUNCTION = 3


def shorter(prompts, completions, completion_ids, **columns):
    seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
    return [-float(len(ids)) for ids in completion_ids]


async def waits(prompts, completions, **kwargs):
    await asyncio.wait_for(started.wait(), 10)
    return [1.0] * len(prompts)


async def starts(prompts, completions, **kwargs):
    started.set()
    return [2] * len(prompts)


class Callable:
    async def __call__(self, prompts, completions, **kwargs):
        return [None] * len(prompts)


callable_object = Callable()


def one_short(prompts, **kwargs):
    return [0.0] * (len(prompts) - 1)


def not_a_list(prompts, **kwargs):
    return 1.0


def words(prompts, **kwargs):
    return ["good"] * len(prompts)


def infinite(prompts, **kwargs):
    return [float("inf")] * len(prompts)


def divides(prompts, **kwargs):
    return [0.0] * (len(prompts) - 1) + [float("nan")]


def exits(prompts, **kwargs):
    raise SystemExit(0)


def times_out_itself(prompts, **kwargs):
    raise TimeoutError("no answer from the judge")


def hangs(prompts, **kwargs):
    threading.Event().wait()


async def hangs_too(prompts, **kwargs):
    await asyncio.Event().wait()


def fails(prompts, **kwargs):
    raise KeyError("colour")
"""


LOCKED = """
import asyncio, re
from grpo_workload import rewards
from grpo_workload.types import Completion, Prompt

def backtracks(prompts, completions):
    return [float(bool(re.match("(a+)+$", "a" * 60 + "b")))]

rewards.LOCK_GRACE = 0.2
prompt = Prompt(index=0, text="", token_ids=(1,))
completion = Completion(token_ids=(1,), logprobs=(0.0,), text="", finish_reason="stop", weight_version=0)
reward = rewards.Reward(name="slow", weight=1, function=backtracks, timeout_seconds=0.2)
asyncio.run(rewards.score([reward], [prompt], [completion]))
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USER_CODE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def make_source(columns=None, *, scorer=None):
    to_prompt = lambda index, row: Prompt(index=index, text="?", token_ids=(1,), columns=columns or {})  # noqa: E731
    return PromptSource([{}], to_prompt, seed=0, scorer=scorer)


def make_prompt(text="2 + 2?", **columns):
    return Prompt(index=0, text=text, token_ids=(1,), columns=columns)


def make_completion(text="4", finish_reason="stop", token_ids=(7, 8)):
    logprobs = (-1.0,) * len(token_ids)
    return Completion(token_ids=token_ids, logprobs=logprobs, text=text, finish_reason=finish_reason, weight_version=0)


def config(name="mine", **kind):
    return RewardConfig.model_validate({"name": name, **kind})


async def run(function, prompts=None, completions=None):
    (reward,) = build_rewards([config(function=function)], make_source())
    return await score([reward], prompts or [make_prompt()] * 2, completions or [make_completion()] * 2)


async def test_weighted_sum_leaves_none_out_and_is_nan_when_all_are():
    rewards = [
        Reward(name="a", weight=1.0, function=lambda prompts, completions: [1.0, None, 0.5, None]),
        Reward(name="b", weight=-2.0, function=lambda prompts, completions: [1.0, 3, None, None]),
    ]
    table = await score(rewards, [make_prompt()] * 4, [make_completion()] * 4)
    assert table.values == [[1.0, None, 0.5, None], [1.0, 3.0, None, None]]
    assert table.totals[:3] == [-1.0, -6.0, 0.5]
    assert math.isnan(table.totals[3])


async def test_stopped():
    (reward,) = build_rewards([config("stopped", stopped={}, weight=0.1)], make_source())
    table = await score([reward], [make_prompt()] * 2, [make_completion(), make_completion(finish_reason="length")])
    assert table == RewardTable(names=["stopped"], values=[[1.0, 0.0]], totals=[0.1, 0.0])


async def test_reasoning_gym_gets_the_stripped_text_and_the_entry():
    calls = []

    def scorer(answer, prompt):
        calls.append((answer, prompt.columns["answer"]))
        return 0.5

    (reward,) = build_rewards([config(reasoningGym={})], make_source(scorer=scorer))
    table = await score([reward], [make_prompt(answer="4")], [make_completion(" 4\n")])
    assert (table.totals, calls) == ([0.5], [("4", "4")])


@pytest.mark.parametrize(
    ("text", "completions"),
    [("2 + 2?", ["4", "5"]), ([{"role": "user", "content": "2 + 2?"}], [[{"role": "assistant", "content": text}] for text in "45"])],
)
async def test_a_function_is_called_as_trl_does(user_module, text, completions):
    prompts = [make_prompt(text, answer=4, level="easy"), make_prompt(text, answer=5, level="hard")]
    answers = [make_completion("4", token_ids=(1, 2, 3)), make_completion("5", token_ids=(4,))]
    table = await run(f"{user_module}:shorter", prompts, answers)
    assert table.values == [[-3.0, -1.0]]
    assert sys.modules[user_module].seen == {
        "prompts": [text, text],
        "completions": completions,
        "completion_ids": [[1, 2, 3], [4]],
        "answer": [4, 5],
        "level": ["easy", "hard"],
    }


async def test_async_functions_run_at_once(user_module):
    rewards = build_rewards([config(name, function=f"{user_module}:{name}") for name in ("waits", "starts")], make_source())
    table = await score(rewards, [make_prompt()], [make_completion()])
    assert table.totals == [3.0]


async def test_an_object_with_an_async_call(user_module):
    assert (await run(f"{user_module}:callable_object")).values == [[None, None]]


async def test_a_sync_function_does_not_hold_up_an_async_one():
    release = threading.Event()

    def blocks(prompts, completions):
        assert release.wait(10)
        return [1.0]

    async def releases(prompts, completions):
        await asyncio.sleep(0)
        release.set()
        return [2.0]

    rewards = [Reward(name="blocks", weight=1, function=blocks), Reward(name="releases", weight=1, function=releases)]
    assert (await score(rewards, [make_prompt()], [make_completion()])).totals == [3.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_short", r"rewards\[mine\] returned 1 values for 2 completions"),
        ("not_a_list", r"rewards\[mine\] must return a list of numbers or None, one a completion"),
        ("words", r"rewards\[mine\] must return a list of numbers .* 'good'"),
        ("infinite", r"rewards\[mine\] returned inf for completion 0 of 2, an answer to prompt 0 of the dataset"),
        ("divides", r"rewards\[mine\] returned nan for completion 1 of 2, .* or None where the reward does not apply"),
        ("exits", r"rewards\[mine\] raised SystemExit: 0"),
        ("times_out_itself", r"rewards\[mine\] raised TimeoutError: no answer from the judge"),
        ("hangs", r"rewards\[mine\] was not done with 2 completions within 0.1 s: .* raise its timeoutSeconds"),
        ("hangs_too", r"rewards\[mine\] was not done with 2 completions within 0.1 s"),
        ("fails", r"rewards\[mine\] raised KeyError: 'colour'"),
    ],
)
async def test_what_goes_wrong_in_a_function_names_the_reward(user_module, function, message):
    (reward,) = build_rewards([config(function=f"{user_module}:{function}")], make_source())
    with pytest.raises(RewardError, match=message):
        await score([dataclasses.replace(reward, timeout_seconds=0.1)], [make_prompt()] * 2, [make_completion()] * 2)


def test_a_function_that_keeps_pythons_lock_is_given_up_on_with_its_stack(tmp_path):
    (tmp_path / "program.py").write_text(LOCKED)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    log = tmp_path / "stderr.log"
    log.write_text(done.stderr)
    assert "in backtracks" in describe_error(tmp_path / "error.json", [log])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"function": "no_such_module:f"}, r"rewards\[mine\]\.function: .* No module named 'no_such_module'; put it on PYTHONPATH"),
        ({"function": "broken_rewards:f"}, r"importing broken_rewards failed with ModuleNotFoundError: .*no_such_package_here"),
        ({"function": "my_rewards:shorte"}, r"module my_rewards has no shorte; it has .*shorter"),
        ({"function": "my_rewards:NOT_A_FUNCTION"}, r"NOT_A_FUNCTION is a int, not a function"),
        ({"reasoningGym": {}}, r"rewards\[mine\]\.reasoningGym: the dataset is not one of reasoning-gym"),
        ({"accuracy": {}}, r"rewards\[mine\]\.accuracy needs a column `solution` or `answer`; the dataset has level"),
    ],
)
def test_what_cannot_be_built_is_told_with_its_name(user_module, kind, message):
    with pytest.raises(ValueError, match=message):
        build_rewards([config(**kind)], make_source({"level": 1}))


async def test_a_rank_without_completions_and_the_table_of_all_ranks():
    rewards = [Reward(name="a", weight=1.0, function=lambda prompts, completions: [1.0 for _ in prompts])]
    tables = [await score(rewards, [make_prompt()] * n, [make_completion()] * n) for n in (2, 0, 1)]
    assert RewardTable.concat(tables) == RewardTable(names=["a"], values=[[1.0] * 3], totals=[1.0] * 3)
