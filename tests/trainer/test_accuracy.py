import asyncio
import signal
from pathlib import Path

import pytest

from grpo_workload.accuracy import Verifier
from grpo_workload.inputs import RewardConfig
from grpo_workload.rewards import build_rewards, score
from grpo_workload.tasks import PromptSource
from grpo_workload.types import Completion, Prompt


@pytest.fixture(scope="module")
def verifier():
    verifier = Verifier(timeout=8)
    yield verifier
    verifier.close()


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


def test_an_answer_that_hangs_counts_as_wrong_and_the_next_is_compared():
    verifier = Verifier(timeout=2)
    verifier("1", "1")
    verifier._process.send_signal(signal.SIGSTOP)  # as in one long operation, which no limit of math-verify's own ends
    assert verifier("12", "12") == 0.0
    assert verifier._process is None
    assert verifier("12", "12") == 1.0
    verifier.close()


def test_a_process_that_died_is_replaced(verifier):
    assert verifier("1", "1") == 1.0
    verifier._process.kill()
    verifier._process.wait()
    assert verifier("1", "1") == 0.0
    assert verifier("1", "1") == 1.0


def test_its_process_has_a_limit_of_memory_and_no_credentials(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "sesame")
    verifier = Verifier(memory_bytes=512 << 20)
    assert verifier("1", "1") == 1.0
    process = Path(f"/proc/{verifier._process.pid}")
    (limit,) = [line.split() for line in (process / "limits").read_text().splitlines() if line.startswith("Max data size")]
    assert limit[3:5] == [str(512 << 20)] * 2
    assert b"sesame" not in (process / "environ").read_bytes()
    verifier.close()


@pytest.mark.parametrize(("columns", "totals"), [({"solution": "$4$", "answer": "9"}, [1.0, 0.0]), ({"answer": 4}, [1.0, 0.0])])
def test_as_a_reward_in_a_thread(columns, totals):
    prompt = Prompt(index=0, text="2 + 2?", token_ids=(1,), columns=columns)
    source = PromptSource([{}], lambda index, row: prompt, seed=0)
    rewards = build_rewards([RewardConfig.model_validate({"name": "right", "accuracy": {}})], source)
    completions = [
        Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason="stop", weight_version=0) for text in ("It is 4.", "5")
    ]
    assert asyncio.run(score(rewards, [prompt, prompt], completions)).totals == totals
