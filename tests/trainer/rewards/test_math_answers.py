"""math-verify in its processes: verdicts, next to its own; references that nothing equals; slow or crashed comparisons
that count as 0, and the processes' limits.
"""

import asyncio
import math
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from grpo_spec.rewards import RewardConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.rewards.math_answers import Verifier
from grpo_workload.rewards.references import read
from grpo_workload.rewards.scoring import (
    begin_check,
    begin_scoring,
    build_rewards,
    close_rewards,
    end_check,
    score,
    take_timeouts,
)

SLOW = f"${'+'.join(['x'] * 50_000)}$"  # math-verify would parse it for longer than it may
CONFIG = RewardConfig.model_validate({"name": "right", "accuracy": {}})


@pytest.fixture(scope="module")
def verifier():
    verifier = Verifier(CONFIG, timeout=8)
    yield verifier
    verifier.close()


def process_of(verifier):
    return verifier._process._process.process


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("12", "7 + 5 = 12", 1.0),
        ("12", "The answer is 12.", 1.0),
        ("12", "13", 0.0),
        ("12", "", 0.0),
        (r"\frac{1}{2}", r"so we get \boxed{0.5}", 1.0),
        ("-7", "-7", 1.0),
        ("what", "12", 0.0),
        ("", "12", None),
        ("12", "$9^{9^{9^{9}}}$", 0.0),
        ("12", r"\boxed{99999999!}", 0.0),
        ("9^{9^{9^{9}}}", "$9^{9^{9^{9}}}$", 1.0),
        # a reference by itself, and numbers that occur in it
        (r"3\sqrt{7}", r"\boxed{3\sqrt{7}}", 1.0),
        (r"3\sqrt{7}", r"\boxed{3}", 0.0),
        ("3^{10}", r"\boxed{3}", 0.0),
        ("3^{10}", r"\boxed{59049}", 1.0),
        ("(2,9)", r"\boxed{(2, 9)}", 1.0),
        ("(2,9)", r"\boxed{(9, 2)}", 0.0),
        (r"\sqrt{57}", r"\boxed{57}", 0.0),
        ("625, 729", r"\boxed{729}", 0.0),
        ("625, 729", r"\boxed{729 \text{ and } 625}", 1.0),
        ("61 boxes of tea", r"\boxed{61}", 1.0),
        ("6.5 \\text{ miles}", r"\boxed{6.5}", 1.0),
        # forms of a number
        ("5", r"\boxed{x = 5}", 1.0),
        ("1000", "$10^3$", 1.0),
        ("2", r"$\sqrt{4}$", 1.0),
        ("50", r"50\%", 1.0),
        ("12", r"$3\times4=12$", 1.0),
        ("90", r"$90^\circ$", 1.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("3/4", "3/4", 1.0),
        ("300000000", r"$3\times10^8$", 1.0),
        (r"\frac{7}{2}", r"\boxed{3\frac{1}{2}}", 1.0),
        ("2x + 6", r"\boxed{2(x + 3)}", 1.0),
        (r"1 \pm \sqrt{19}", r"\boxed{1 + \sqrt{19}, 1 - \sqrt{19}}", 1.0),
        ("0.0000004", r"\boxed{0.0000004}", 1.0),
        ("0.0000004", r"\boxed{0.0000003}", 0.0),
        ("0.0000004", r"\boxed{0.0}", 0.0),
        # arithmetic that is left
        ("6", "8 - 2", 0.0),
        ("6", "8 - 2 = ?", 0.0),
        ("6", "8 - 2 = 2 * 3", 0.0),
        ("8", "$8-2=?$", 0.0),
        ("6", "12 / 2", 0.0),
        ("6", r"$12 \div 2$", 0.0),
        ("6", r"\boxed{\frac{12}{2}}", 0.0),
        ("6", r"\boxed{x = 8 - 2}", 0.0),
        ("1023", "$2^{10} - 1$", 0.0),
        ("(6, 1)", r"\boxed{(8 - 2, 1)}", 0.0),
        ("8 - 2", "8 - 2", 1.0),
        # words
        ("B", r"\boxed{\text{B}}", 1.0),
        ("(B)", r"\boxed{B}", 1.0),
        (r"\text{B}", r"so it is\n\n**Answer: (B)**.", 1.0),
        ("B", "B", 1.0),
        ("B", r"\boxed{C}", 0.0),
        ("B", "The answer is not B but C.", 0.0),
        ("east", r"\boxed{\text{East}}", 1.0),
        ("east", r"\boxed{seat}", 0.0),
        ("seat", r"\boxed{seat}", 1.0),
        ("no solution", r"\boxed{\text{No solution.}}", 1.0),
        ("xy", r"\boxed{yx}", 1.0),
        ("abc", r"\boxed{bca}", 1.0),
        ("No", r"\boxed{on}", 0.0),
        ("infinitely many solutions", r"\boxed{\text{infinitely many solutions}}", 1.0),
        ("truth-teller", "The answer is truth-teller.", 1.0),
        ("B", r"\boxed{\textbf{(B)}\ 12}", 1.0),
        ("B", r"\boxed{(B) or (C)}", 0.0),
        (r"\textbf{(B)}\ 12", r"\boxed{B}", 1.0),
        ("B) 12", r"\boxed{C) 12}", 0.0),
        # what counts in a completion
        ("12", "<think>3+4 = 7 and 8</think><answer>12</answer>", 1.0),
        ("8", "<think>3+4 = 7 and 8</think><answer>12</answer>", 0.0),
        ("5", r"<think>maybe \boxed{5}</think> The answer is 6.", 0.0),
        ("6", r"maybe \boxed{5}</think> The answer is 6.", 1.0),
        ("5", r"<think>maybe \boxed{5}", 0.0),
        ("0.3", r"\boxed{1.5/5}", 1.0),
        (r"1.6 \times 10^{-19}", r"\boxed{1.7 \times 10^{-19}}", 0.0),
        (r"1.6 \times 10^{-19}", r"\boxed{1.6 \times 10^{-19}}", 1.0),
        (r"\pi", r"\boxed{\pi}", 1.0),
    ],
)
def test_verdicts(verifier, gold, answer, verdict):
    assert verifier(read(gold), answer) == verdict


NUMBERS = st.integers(2, 99)
FORMS = st.one_of(
    NUMBERS.map(str),
    NUMBERS.map(lambda n: f"-{n}"),
    NUMBERS.map(lambda n: rf"{n}\%"),
    NUMBERS.map(lambda n: rf"{n}^\circ"),
    NUMBERS.map(lambda n: f"x = {n}"),
    NUMBERS.map(lambda n: rf"\sqrt{{{n * n}}}"),
    NUMBERS.map(lambda n: rf"\sqrt{{{n}}}"),
    NUMBERS.map(lambda n: f"{n}^2"),
    NUMBERS.map(lambda n: f"{n / 10}"),
    st.tuples(NUMBERS, NUMBERS.filter(lambda n: n > 49)).map(lambda pair: rf"\frac{{{pair[0] % 49 + 1}}}{{{pair[1]}}}"),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: f"({pair[0]}, {pair[1]})"),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: rf"\{{{pair[0]}, {pair[1]}\}}"),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: rf"{pair[0]}\sqrt{{{pair[1]}}}"),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: f"{pair[0]}x + {pair[1]}"),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: f"x < {pair[0]}"),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(FORMS, min_size=2, max_size=2, unique=True), st.booleans())
def test_what_math_verify_finds_equal_is_equal(verifier, forms, same):
    """No form here is arithmetic that is left, a word, or as small as the numbers that the reward compares closer."""
    gold, answer = forms[0], rf"so \boxed{{{forms[0] if same else forms[1]}}}"
    gold_parsed, answer_parsed = (parse(text, parsing_timeout=None) for text in (rf"\boxed{{{gold}}}", answer))
    equal = verify(gold_parsed, answer_parsed, timeout_seconds=None)
    assert verifier(read(gold), answer) == float(equal)


@given(st.tuples(NUMBERS, NUMBERS), st.sampled_from(["{} + {}", "{} - {}", r"{} \times {}", "{} * {}"]))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_arithmetic_that_is_left_is_the_exception(verifier, pair, form):
    left = form.format(*pair)
    value = str(eval(left.replace(r"\times", "*")))
    for answer in (left, f"${left}$", rf"\boxed{{{left}}}", f"{left} = ?", f"${left} = ?$"):
        assert verifier(read(value), answer) == 0.0
    assert verifier(read(value), f"${left} = {value}$") == 1.0
    assert verifier(read(left), rf"\boxed{{{left}}}") == 1.0


def test_an_answer_that_takes_long_is_told_from_a_wrong_one(verifier):
    assert math.isnan(verifier(read("12"), SLOW))


def test_an_answer_that_hangs_is_given_up_and_the_next_is_compared():
    verifier = Verifier(CONFIG, timeout=2)
    verifier(read("1"), "1")
    process_of(verifier).send_signal(
        signal.SIGSTOP
    )  # like one long operation, which math-verify's own limits cannot end
    assert math.isnan(verifier(read("12"), "12"))
    assert verifier._process is None
    assert verifier(read("12"), "12") == 1.0
    verifier.close()


def test_a_process_that_died_is_replaced(verifier):
    assert verifier(read("1"), "1") == 1.0
    process_of(verifier).kill()
    process_of(verifier).wait()
    assert math.isnan(verifier(read("1"), "1"))
    assert verifier(read("1"), "1") == 1.0


def test_the_process_has_a_memory_limit_and_no_credentials(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "sesame")
    verifier = Verifier(CONFIG.model_copy(update={"memory_limit": "512Mi"}))
    assert verifier(read("1"), "1") == 1.0
    process = Path(f"/proc/{process_of(verifier).pid}")
    (limit,) = [
        line.split() for line in (process / "limits").read_text().splitlines() if line.startswith("Max data size")
    ]
    assert limit[3:5] == [str(512 << 20)] * 2
    assert b"sesame" not in (process / "environ").read_bytes()
    verifier.close()


def test_the_reward_compares_with_the_column_at_each_step_and_counts_what_takes_too_long():
    prompt = Prompt(index=0, text="2 + 2?", token_ids=(1,), columns={"solution": "$4$", "answer": "9"})
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


def test_rows_whose_references_cannot_be_compared_are_named(caplog):
    values = ["4", r"3\sqrt{7}", "B", ["12", "twelve"], "see the appendix for how the whole proof is done", None]
    prompts = [Prompt(index=i, text="?", token_ids=(1,), columns={"answer": value}) for i, value in enumerate(values)]
    rewards = build_rewards([CONFIG], PromptSource([{}], lambda index, row: prompts[0], seed=0))
    for prompt in [*prompts, *prompts]:
        begin_check(rewards, prompt)
    end_check(rewards, "dataset")
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "of the 6 rows of dataset" in message
    assert "2 have no answer that can be read" in message
    assert f"(row 4: {values[4]}; row 5: nothing)" in message
    begin_check(rewards, prompts[0])
    end_check(rewards, "dataset")
    assert len(caplog.records) == 1
    close_rewards(rewards)
