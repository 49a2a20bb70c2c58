"""math-verify in its processes: verdicts, slow or crashed comparisons that count as 0, and the processes' limits."""

import asyncio
import math
import signal
from pathlib import Path

import pytest

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.rewards.math_answers import Verifier
from grpo_workload.rewards.scoring import begin_scoring, build_rewards, close_rewards, score, take_timeouts
from grpo_workload.spec.rewards import RewardConfig

SLOW = f"${'+'.join(['x'] * 50_000)}$"  # math-verify would parse it for longer than it may
CONFIG = RewardConfig.model_validate({"name": "right", "accuracy": {}})


@pytest.fixture(scope="module")
def verifier():
    verifier = Verifier(CONFIG, timeout=8)
    yield verifier
    verifier.close()


def process_of(verifier):
    return verifier._process._process


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("12", "7 + 5 = 12", 1.0),
        ("12", "The answer is 12.", 1.0),
        ("12", "13", 0.0),
        ("12", "", 0.0),
        (r"\frac{1}{2}", r"so we get \boxed{0.5}", 1.0),
        ("-7", "-7", 1.0),
        ("6", "8 - 2", 0.0),
        ("6", "8 - 2 = ?", 0.0),
        ("6", "8 - 2 = 2 * 3", 0.0),
        ("8 - 2", "8 - 2", 1.0),
        ("what", "12", None),
        ("12", "$9^{9^{9^{9}}}$", 0.0),
    ],
)
def test_verdicts(verifier, gold, answer, verdict):
    assert verifier(gold, answer) == verdict


def test_an_answer_that_takes_long_is_told_from_a_wrong_one(verifier):
    assert math.isnan(verifier("12", SLOW))


def test_an_answer_that_hangs_is_given_up_and_the_next_is_compared():
    verifier = Verifier(CONFIG, timeout=2)
    verifier("1", "1")
    process_of(verifier).send_signal(
        signal.SIGSTOP
    )  # like one long operation, which math-verify's own limits cannot end
    assert math.isnan(verifier("12", "12"))
    assert verifier._process is None
    assert verifier("12", "12") == 1.0
    verifier.close()


def test_a_process_that_died_is_replaced(verifier):
    assert verifier("1", "1") == 1.0
    process_of(verifier).kill()
    process_of(verifier).wait()
    assert math.isnan(verifier("1", "1"))
    assert verifier("1", "1") == 1.0


def test_the_process_has_a_memory_limit_and_no_credentials(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "sesame")
    verifier = Verifier(CONFIG.model_copy(update={"memory_limit": "512Mi"}))
    assert verifier("1", "1") == 1.0
    process = Path(f"/proc/{process_of(verifier).pid}")
    (limit,) = [
        line.split() for line in (process / "limits").read_text().splitlines() if line.startswith("Max data size")
    ]
    assert limit[3:5] == [str(512 << 20)] * 2
    assert b"sesame" not in (process / "environ").read_bytes()
    verifier.close()


@pytest.mark.parametrize("columns", [{"solution": "$4$", "answer": "9"}, {"answer": 4}])
def test_the_reward_compares_with_the_column_at_each_step_and_counts_what_takes_too_long(columns):
    prompt = Prompt(index=0, text="2 + 2?", token_ids=(1,), columns=columns)
    source = PromptSource([{}], lambda index, row: prompt, seed=0)
    rewards = build_rewards([CONFIG], source)
    completions = [
        Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason="stop", weight_version=0)
        for text in ("It is 4.", "5", SLOW, "It is 4.")
    ]
    begin_scoring(rewards, prompt, completions[:2])  # before the others are there
    compared = []
    for _step in range(2):  # the processes outlive a step
        table = asyncio.run(score(rewards, [prompt] * 4, completions, lambda: compared.append(None)))
        assert table.totals == [1.0, 0.0, 0.0, 1.0]
        assert take_timeouts(rewards) == {"right": 1}
    assert take_timeouts(rewards) == {"right": 0}
    assert len(compared) == 8
    close_rewards(rewards)
