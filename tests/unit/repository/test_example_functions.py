"""The functions of examples/ do what their first lines and pages say, in the processes that would run them."""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_cli.documents.manifest import load_job
from grpo_operator.layout.job import Job
from grpo_workload.data.prompt_maker import Preprocess
from grpo_workload.rewards.process import RewardProcess
from support.answers import answering
from support.documents import write_code
from support.paths import EXAMPLES


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return the job of a manifest; its functions can be imported, from its ConfigMap or its folder."""

    def load(name: str) -> Job:
        write_code(EXAMPLES / name, tmp_path)
        monkeypatch.syspath_prepend((EXAMPLES / name).parent)
        monkeypatch.syspath_prepend(tmp_path)
        return load_job(EXAMPLES / name).job("default")

    return load


@contextmanager
def reward(job: Job, name: str, **params: Any) -> Iterator[Any]:
    """Call a job's reward in its process: completions and columns in, rewards out. `params`: in place of its own."""
    (config,) = [one for one in job.spec.rewards if one.name == name]
    with closing(RewardProcess(config.model_copy(update={"params": params} if params else {}), os.environ)) as process:
        process.ready()
        yield lambda completions, **columns: process.call({"completions": completions, "prompts": [], **columns}, 60)


def prepared(job: Job, row: dict[str, Any]) -> dict[str, Any]:
    assert job.spec.dataset.preprocess is not None
    return Preprocess(job.spec.dataset.preprocess)(0, row, seed=1)


def says(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_the_custom_functions_do_what_their_page_says(example: Any) -> None:
    job = example("custom-reward/job.yaml")
    row = {
        "question": "Ann has 48 clips and half as many pins. How many?",
        "answer": "48 / 2 = 24 pins.\n48 + 24 = 72.\n#### 1,072",
    }
    made = prepared(job, row)
    assert [message["role"] for message in made["prompt"]] == ["system", "user"]
    assert (made["solution"], made["num_steps"]) == ("1072", 2)
    with reward(job, "readable") as call:
        answers = says("24 pins.\n72 in all.\n#### 72", "Short.\n#### 72", "#### 72 it is, I think", "72")
        assert call(answers, num_steps=[2] * 4) == [1.0, 0.5, 0.0, 0.0]


def test_the_calculator_brings_its_code_and_scores_the_last_turn(example: Any) -> None:
    job, folder = example("calculator/job.yaml"), EXAMPLES / "calculator"
    (brought,) = [one for one in yaml.safe_load_all((folder / "job.yaml").read_text()) if one["kind"] == "ConfigMap"]
    assert brought["data"] == {"calculator.py": (folder / "calculator.py").read_text()}
    made = prepared(job, {"question": "Calculate 12 * 13.", "answer": "156"})
    assert made["answer"] == "156"
    assert made["prompt"][-1] == {"role": "user", "content": "What is 12 * 13?"}
    *calling, last = made["prompt"][2:5]
    completions = [[*calling, {**last, "content": "12 * 13 = 156"}], [*calling, last], calling[:1]]
    with reward(job, "right") as call:
        assert call(completions, answer=["156"] * 3) == [1.0, 0.0, 0.0]


def test_problems_of_math_500_become_messages(example: Any) -> None:
    job = example("qwen3-math.yaml")
    row = {"problem": "Two and two?", "solution": r"It is $\boxed{4}$.", "answer": "4"}
    assert job.spec.evaluation.dataset.preprocess == "rows:prepare"
    made = Preprocess(job.spec.evaluation.dataset.preprocess)(0, row, seed=1)
    assert made == {"prompt": [{"role": "user", "content": "Two and two?"}], "answer": "4"}


def test_summaries_are_paid_for_twenty_words(example: Any) -> None:
    with reward(example("tldr.yaml"), "short") as call:
        assert call(["word " * 20, "word " * 22, "word"]) == pytest.approx([0.0, -0.1, -0.95])


PROGRAM = "```python\ndef twice(n):\n    return {}\n```"


def test_programs_are_paid_for_the_tests_that_they_pass(example: Any) -> None:
    """Text that is no program, programs that hang, and those that end before their test pass none."""
    job = example("code-tests.yaml")
    tests = ["assert twice(2) == 4", "assert twice(0) == 0"]
    row = {"text": "Write a function that doubles a number.", "code": "def twice(n): return 2 * n", "test_list": tests}
    row |= {"test_setup_code": "", "challenge_test_list": []}
    made = prepared(job, row)
    assert "assert twice(2) == 4" in made["prompt"][0]["content"]
    answers = says(
        "So:\n" + PROGRAM.format("2 * n"),
        PROGRAM.format("n * n * n"),
        "twice(n)",
        PROGRAM.format("exit(0)"),
        PROGRAM.format("[1 for _ in iter(int, 1)]").replace("    return", "    while n == 2: pass\n    return"),
        PROGRAM.format("2 * n").replace("def", "print('passed')\nraise SystemExit\ndef"),
    )
    columns = {"tests": [made["tests"]] * len(answers), "setup": [made["setup"]] * len(answers)}
    with reward(job, "passes") as call:
        assert call(answers, **columns) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_calls_are_paid_for_those_that_the_row_has(example: Any) -> None:
    job = example("function-calls.yaml")
    right = [{"name": "rain", "arguments": {"city": "Oslo", "days": 2}}, {"name": "now", "arguments": {}}]
    row = {"query": "Rain in Oslo?", "tools": '[{"name": "rain"}]', "answers": json.dumps(right)}
    made = prepared(job, row)
    assert made["prompt"][0]["content"].endswith(row["tools"])
    other = [{"arguments": {"days": 2, "city": "Oslo"}, "name": "rain"}]
    answers = says(json.dumps(right[::-1]), json.dumps(other), json.dumps(other * 4), "rain", "{}", "[]")
    with reward(job, "right") as call:
        assert call(answers, calls=[made["calls"]] * len(answers)) == [1.0, 0.5, 0.25, 0.0, 0.0, 0.0]


def test_a_learned_reward_is_the_logit_that_the_server_answers(example: Any) -> None:
    """As `vllm serve --runner pooling` answers at /classify, which is away at first, as while it loads."""
    asked: list[dict[str, Any]] = []

    def scores(body: dict[str, Any], _: object) -> tuple[int, Any]:
        asked.append(body)
        score = -float(len(body["messages"][-1]["content"]))
        return (503 if len(asked) == 1 else 200), {"data": [{"index": 0, "probs": [score], "num_classes": 1}]}

    prompts = [[{"role": "user", "content": "Hello"}]] * 2
    job = example("reward-model.yaml")
    with answering(scores) as url, reward(job, "score", url=url, model="m") as call:
        assert call(says("Hi", "Good day"), prompts=prompts) == [-2.0, -8.0]
    assert [len(one["messages"]) for one in asked] == [2, 2, 2]
    assert {(one["model"], one["use_activation"]) for one in asked} == {("m", False)}
