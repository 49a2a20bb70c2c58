"""Tasks of reasoning-gym that SmolLM2-135M-Instruct gets better at, and the share of held-out problems it solves.

`sums` is the quickstart's. Held-out problems are those of another seed whose text is not among the prompts that a run
trains on. A saved model answers them greedily, by transformers, so that both trainers' models are asked alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spec.inputs import DatasetConfig
from grpo_spec.rewards import RewardConfig
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.prompt_source import PromptSource

HELD_OUT_SEED = 1_000_003  # no run trains with it
HELD_OUT, BATCH = 200, 100  # problems, and how many of them are asked at once
PROMPTS, GENERATIONS, NEW_TOKENS = 6, 8, 16  # of a step of training; tokens of a completion
ACCURACY = {"name": "accuracy", "accuracy": {}}  # of `spec.rewards`
RATE, STOPPED = 2e-5, 0.15  # the learning rate, and the weight of the reward for stopping


@dataclass(frozen=True, slots=True)
class Task:
    """A set of reasoning-gym, whose answers are numbers, with its parameters and how its problems are put."""

    dataset: str
    params: dict[str, Any]
    template: str = "{prompt} Give only the answer."
    system: str = "Math."

    @property
    def source(self) -> dict[str, Any]:
        """`spec.dataset` of a job."""
        return {
            "reasoningGym": {"dataset": self.dataset, "params": self.params, "size": 10000},
            "systemPrompt": self.system,
            "promptTemplate": self.template,
        }

    def load(self, tokenizer: Any, seed: int) -> PromptSource:
        """Return the prompts that a job with this `training.seed` trains on."""
        return load_prompts(DatasetConfig.model_validate(self.source), tokenizer, seed=seed)


TASKS = {
    "sums": Task(
        "basic_arithmetic",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ["+", "-"],
            "allow_parentheses": False,
        },
    ),
    "gcd": Task(
        "gcd",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30},
        "Q: Find the Greatest Common Divisor (GCD) of these numbers: 12, 8.\nA: 4\n"
        "Q: Find the Greatest Common Divisor (GCD) of these numbers: 9, 10.\nA: 1\n"
        "Q: Find the Greatest Common Divisor (GCD) of these numbers: 15, 24.\nA: 3\nQ: {prompt}\nA:",
        "Answer like the examples.",
    ),
    "letters": Task(
        "letter_counting",
        {"min_words": 4, "max_words": 8},
        'Q: How many times does the letter "e" appear in the text: "we see"?\nA: 3\n'
        'Q: How many times does the letter "t" appear in the text: "the end"?\nA: 1\n'
        'Q: How many times does the letter "o" appear in the text: "go to bed"?\nA: 2\nQ: {prompt}\nA:',
        "Answer like the examples.",
    ),
}


def judge() -> Callable[[Prompt, str], float | None]:
    """Return the reward `accuracy` of a job, as a function of a prompt and a completion."""
    from grpo_workload.rewards.math_answers import Verifier
    from grpo_workload.rewards.references import read

    verify = Verifier(RewardConfig.model_validate(ACCURACY))
    return lambda prompt, text: verify(read(prompt.columns["answer"]), text)


def held_out(source: PromptSource, trained: Iterable[Prompt]) -> list[Prompt]:
    """Return problems that are not among those that a run trains on; `source` has those of `HELD_OUT_SEED`."""
    seen = {prompt.token_ids for prompt in trained}
    found = {prompt.token_ids: prompt for prompt in source.batch(0, 5 * HELD_OUT) if prompt.token_ids not in seen}
    return list(found.values())[:HELD_OUT]


def commonest(problems: Sequence[Prompt]) -> float:
    """Return the share that a model would solve that gives the commonest answer to all."""
    counts = Counter(prompt.columns["answer"] for prompt in problems)
    return round(max(counts.values()) / len(problems), 4)


def solved(problems: Sequence[Prompt], folder: str | Path, device: str) -> float:
    """Return the share of problems that a saved model solves."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    verify, right = judge(), 0
    for begin in range(0, len(problems), BATCH):
        some = problems[begin : begin + BATCH]
        asked = tokenizer.pad({"input_ids": [list(one.token_ids) for one in some]}, return_tensors="pt").to(device)
        answers = model.generate(**asked, do_sample=False, max_new_tokens=NEW_TOKENS)[:, asked["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right += sum(verify(prompt, text) == 1 for prompt, text in zip(some, texts, strict=True))
    return round(right / len(problems), 4)
