"""Rewards in the rank: built-in ones, the weighted sum, concurrency, time limits, and what `build_rewards` refuses."""

import dataclasses
import math
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
from trl.rewards import get_soft_overlong_punishment

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Episode, Fork
from grpo_workload.launcher.rank_exits import describe_error
from grpo_workload.rewards import scoring
from grpo_workload.rewards.math_answers import Accuracy
from grpo_workload.rewards.scorer import Function, RewardError
from grpo_workload.rewards.scoring import Reward, build_rewards, score
from grpo_workload.rewards.table import RewardTable
from grpo_workload.rewards.user_function import UserFunction
from support.trainer.reward_inputs import make_completion, make_config, make_prompt, make_source

USER = "support.trainer.user_rewards"
SCHEMA = {
    "type": "object",
    "required": ["n"],
    "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}},
    "additionalProperties": False,
}

LOCKED = """
import asyncio, re
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.rewards import scoring
from grpo_workload.rewards.scorer import Function

def backtracks(prompts, completions):  # what reasoning-gym's scorers may come to
    return [float(bool(re.match("(a+)+$", "a" * 60 + "b")))]

scoring.LOCK_GRACE = 0.2
prompt = Prompt(index=0, text="", token_ids=(1,))
completion = Completion(token_ids=(1,), logprobs=(0.0,), text="", finish_reason="stop", weight_version=0)
reward = scoring.Reward(name="slow", weight=1, scorer=Function(backtracks), timeout_seconds=0.2)
asyncio.run(scoring.score([reward], [prompt], [completion]))
"""


@pytest.fixture
def broken_modules(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("import no_such_package_here\n")
    (tmp_path / "large_rewards.py").write_text("held = bytearray(400 << 20)\n\ndef f(prompts, **kwargs): ...\n")
    (tmp_path / "gone_rewards.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_the_reward_environment_is_what_get_reward_returned():
    (reward,) = build_rewards([make_config(environment={})], make_source())
    answers = [dataclasses.replace(make_completion(), episode=episode) for episode in (Episode(reward=0.5), Episode())]
    table = await score([reward], [make_prompt()] * 3, [*answers, make_completion()])
    assert table.values == [[0.5, None, None]]


async def test_no_reward_sees_lost_episodes():
    seen = []
    reward = Reward(name="a", weight=1.0, scorer=Function(lambda prompts, completions: [seen.append(1) or 1.0]))
    lost = dataclasses.replace(make_completion(), episode=Episode(lost="process"))
    table = await score([reward], [make_prompt()] * 2, [lost, make_completion()])
    assert (table.values, len(seen)) == ([[None, 1.0]], 1)
    assert (await score([reward], [make_prompt()], [lost])).values == [[None]]
    assert len(seen) == 1


async def test_the_weighted_sum_skips_none_and_is_nan_if_all_are_none():
    rewards = [
        Reward(name="a", weight=1.0, scorer=Function(lambda prompts, completions: [1.0, None, 0.5, None])),
        Reward(name="b", weight=-2.0, scorer=Function(lambda prompts, completions: [1.0, 3, None, None])),
    ]
    table = await score(rewards, [make_prompt()] * 4, [make_completion()] * 4)
    assert table.values == [[1.0, None, 0.5, None], [1.0, 3.0, None, None]]
    assert table.totals[:3] == [-1.0, -6.0, 0.5]
    assert math.isnan(table.totals[3])


async def test_the_reward_stopped():
    (reward,) = build_rewards([make_config("stopped", stopped={}, weight=0.1)], make_source())
    table = await score([reward], [make_prompt()] * 2, [make_completion(), make_completion(finish_reason="length")])
    assert table == RewardTable(names=["stopped"], values=[[1.0, 0.0]], totals=[0.1, 0.0], overflows=[None] * 2)


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        (
            {"format": {"tags": ["think", "answer"]}},
            ["<think>a\n<b></think>\n <answer>4</answer>\n", "<think></think><answer></answer>"],
            [
                "<think>a</think>",
                "<answer>4</answer><think>a</think>",
                "So: <think>a</think><answer>4</answer>",
                "<think>a</think><answer>4</answer><answer>5</answer>",
                "<think>a<think>b</think></think><answer>4</answer>",
                "<think>a</think> so <answer>4</answer>",
            ],
        ),
        ({"format": {"pattern": r"(a|b)+\d"}}, [" aab1\n"], ["aab", "aab12", "c1"]),
        ({"exactMatch": {}}, ["Paris", " PARIS.\n"], ["It is Paris", "", "paris .5"]),
        (
            {"exactMatch": {"extract": "<answer>(.*?)</answer>"}},
            ["<answer>London</answer> no, <answer>\nparis</answer>", "<answer>Ville  lumière</answer>"],
            ["Paris", "<answer>Paris</answer> <answer>London</answer>"],
        ),
        (
            {"jsonSchema": {"inline": SCHEMA}},
            ['{"n": 1}', ' {"n": 2, "next": {"n": 3}}\n'],
            ["", "{'n': 1}", '{"n": "1"}', '{"n": NaN}', '{"n": 1, "next": {}}', '{"n": 1} {"n": 1}', "[" * 100_000],
        ),
        (
            {"jsonSchema": {"inline": SCHEMA, "extract": "<call>(.*?)</call>"}},
            ['<call>{}</call> no: <call>{"n": 1}</call>'],
            ['{"n": 1}', '<call>{"n": 1}</call> <call></call>'],
        ),
    ],
)
async def test_what_is_right_by_its_text(settings, right, wrong):
    (reward,) = build_rewards([make_config(**settings)], make_source({"answer": "?"}))
    prompt = make_prompt(answer=["Paris", "ville lumie\u0300re"])
    texts = right + wrong
    table = await score([reward], [prompt] * len(texts), [make_completion(text) for text in texts])
    assert table.values == [[1.0] * len(right) + [0.0] * len(wrong)]


@pytest.mark.parametrize(
    ("ending", "text", "value"),
    [
        ("assistant\n<think>\n", "a</think><answer>4</answer>", 1.0),
        ("Answer: <think>", "a</think>\n<answer>4</answer>", 1.0),
        ("<think>\n", "a", 0.0),
        ("<think>\n", "<think>a</think><answer>4</answer>", 0.0),
        ("Begin with <think>. Assistant:", "a</think><answer>4</answer>", 0.0),
        ("<answer>", "4</answer>", 0.0),
    ],
)
async def test_a_first_tag_that_the_prompt_ends_with_is_part_of_the_format(ending, text, value):
    (reward,) = build_rewards([make_config(format={"tags": ["think", "answer"]})], make_source())
    prompt = dataclasses.replace(make_prompt(), ending=ending)
    assert (await score([reward], [prompt], [make_completion(text)])).values == [[value]]


async def test_each_row_may_have_its_own_schema_which_refers_to_nothing_outside_of_it():
    (reward,) = build_rewards([make_config(jsonSchema={"column": "schema"})], make_source({"schema": "true"}))
    schemas = ['{"type": "integer"}', {"type": "string"}, None, "false"]
    prompts = [make_prompt(schema=schema) for schema in schemas]
    assert (await score([reward], prompts, [make_completion("4")] * 4)).values == [[1.0, 0.0, None, 0.0]]
    with pytest.raises(ConfigError, match=r"row 0: the schema refers to .*example.com/a.json, which is not in it"):
        await score([reward], [make_prompt(schema='{"$ref": "http://example.com/a.json"}')], [make_completion("4")])


async def test_a_row_without_an_answer_is_left_out_of_exact_match_and_numbers_are_text():
    (reward,) = build_rewards([make_config(exactMatch={"column": "gold"})], make_source({"gold": 1}))
    prompts = [make_prompt(gold=gold) for gold in (None, [], 4, "4")]
    assert (await score([reward], prompts, [make_completion("4")] * 4)).values == [[None, None, 1.0, 1.0]]


async def test_soft_overlong_is_that_of_trl():
    (reward,) = build_rewards([make_config(softOverlong={"maxLength": 10, "cacheLength": 4})], make_source())
    completions = [make_completion(token_ids=(1,) * length) for length in range(1, 13)]
    table = await score([reward], [make_prompt()] * 12, completions)
    expected = get_soft_overlong_punishment(10, 4)([list(one.token_ids) for one in completions])
    assert table.values == [pytest.approx(expected)]


async def test_soft_overlong_counts_all_sequences_of_an_episode():
    (reward,) = build_rewards([make_config(softOverlong={"maxLength": 10, "cacheLength": 4})], make_source())
    last = make_completion(token_ids=(1,) * 4)

    def forked(length, context=()):
        fork = Fork(prompt_ids=(1,), token_ids=(1,) * length, logprobs=(0.0,) * length, context=context)
        return dataclasses.replace(last, episode=Episode(prompt_ids=(1,), forks=(fork,)))

    table = await score([reward], [make_prompt()] * 3, [last, forked(4), forked(10, ((0, 9),))])
    assert table.values == [[0.0, -0.5, -1.0]]


async def test_reasoning_gym_gets_the_stripped_text_and_the_entry():
    calls = []

    def scorer(answer, prompt):
        calls.append((answer, prompt.columns["answer"]))
        return 0.5

    (reward,) = build_rewards([make_config(reasoningGym={})], make_source(scorer=scorer))
    table = await score([reward], [make_prompt(answer="4")], [make_completion(" 4\n")])
    assert (table.totals, calls) == ([0.5], [("4", "4")])


async def test_functions_run_concurrently():
    meeting = threading.Barrier(2, timeout=60)

    def meets(prompts, completions):
        meeting.wait()
        return [2.0]

    rewards = [Reward(name=name, weight=1, scorer=Function(meets)) for name in ("a", "b")]
    assert (await score(rewards, [make_prompt()], [make_completion()])).totals == [4.0]


async def test_a_function_that_hangs_is_named_when_its_seconds_are_over_and_is_not_waited_for():
    hangs = Function(lambda prompts, completions: threading.Event().wait())
    reward = Reward(name="mine", weight=1, scorer=hangs, timeout_seconds=0.2)
    with pytest.raises(RewardError, match=r"rewards\[mine\] was not done with 1 completion within 0.2 s"):
        await score([reward], [make_prompt()], [make_completion()])


async def test_the_interpreter_is_watched_while_any_reward_but_accuracy_scores(monkeypatch):
    """Also one that limits itself, as a user's function in a process of its own does."""
    watched = []
    monkeypatch.setattr(scoring, "_interpreter_watched", lambda seconds: watched.append(seconds) or nullcontext())

    class LimitsItself(Function):
        limits_itself = True

    scorer = LimitsItself(lambda prompts, completions: [1.0])
    of_user = Reward(name="own", weight=1.0, scorer=scorer, timeout_seconds=7.0)
    await score([of_user], [make_prompt()], [make_completion()])
    assert watched == [7.0 + scoring.LOCK_GRACE]
    assert UserFunction.limits_itself
    assert UserFunction.is_watched
    assert not Accuracy.is_watched


def test_a_function_that_holds_the_gil_ends_the_rank_with_its_stack_in_the_log(tmp_path):
    (tmp_path / "program.py").write_text(LOCKED)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    log = tmp_path / "stderr.log"
    log.write_text(done.stderr)
    assert "in backtracks" in describe_error(tmp_path / "error.json", [log])


@pytest.mark.usefixtures("broken_modules")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"function": "no_such_module:f"}, "function: .* No module named 'no_such_module'; put it on PYTHONPATH"),
        ({"function": "broken_rewards:f"}, "function: .*failed with ModuleNotFoundError: .*no_such_package_here"),
        ({"function": f"{USER}:shorte"}, f"function: .*module {USER} has no shorte; it has .*shorter"),
        (
            {"function": "large_rewards:f", "memoryLimit": "300Mi"},
            "function: .*MemoryError: .*; its memoryLimit is 300Mi: ",
        ),
        ({"function": f"{USER}:NOT_A_FUNCTION"}, "function: .*NOT_A_FUNCTION is a int, not a function"),
        ({"reasoningGym": {}}, "reasoningGym: the dataset is not a reasoning-gym dataset"),
        ({"exactMatch": {}}, r"exactMatch\.column: the dataset has no column answer; it has level"),
        (
            {"jsonSchema": {"inline": {"type": "objekt"}}},
            r"jsonSchema\.inline: this is no JSON Schema: 'objekt' is not",
        ),
        ({"jsonSchema": {"column": "schema"}}, r"jsonSchema\.column: the dataset has no column schema; it has level"),
        (
            {"jsonSchema": {"column": "level"}},
            r"jsonSchema\.column: row 0: this is no JSON Schema: 1 is not of type 'obj",
        ),
        ({"accuracy": {}}, "accuracy needs a column `solution` or `answer`; the dataset has level"),
    ],
)
def test_a_reward_that_cannot_be_built_is_named_with_its_field(kind, message):
    with pytest.raises(ValueError, match=rf"rewards\[mine\]\.{message}"):
        build_rewards([make_config(**kind)], make_source({"level": 1}))


@pytest.mark.usefixtures("broken_modules")
def test_a_process_that_ends_during_the_import_is_reported():
    said = r"rewards\[mine\]: its process ended with exit code 3 while it imported gone_rewards:f"
    with pytest.raises(RewardError, match=said):
        build_rewards([make_config(function="gone_rewards:f")], make_source())


async def test_tables_of_all_ranks_are_joined_also_of_one_without_completions():
    rewards = [Reward(name="a", weight=1.0, scorer=Function(lambda prompts, completions: [1.0 for _ in prompts]))]
    tables = [await score(rewards, [make_prompt()] * n, [make_completion()] * n) for n in (2, 0, 1)]
    whole = RewardTable(names=["a"], values=[[1.0] * 3], totals=[1.0] * 3, overflows=[None] * 3)
    assert RewardTable.concat(tables) == whole
