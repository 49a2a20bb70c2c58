"""Bound what drafts by n-grams could save of a step's sampling: tokens that one pass of the model would then yield.

    python -m benchmarks.generation.ngrams --output ngrams.jsonl

A small instructed model answers questions that ask for long explanations, sampled at temperature 1 as GRPO samples.
Each answer is then replayed: before each token, vLLM's own proposer looks for the last tokens in what is there already,
and drafts what followed them. A draft that proposes one token with certainty is accepted as often as the model samples
that token, so the sampled text itself says what a verifying engine would have accepted. Nothing is timed: a pass that
verifies a draft is taken to cost no more than one that does not, and the proposer nothing, which no engine reaches.

A line has the tokens of a pass for each length of drafts, over whole answers and beyond their first 256 tokens, and the
most that a step can gain if the passes with at most `--few` running completions use drafts: lengths as the benchmarks
impose them (log-normal, 64 completions), all passes equally long, sampling being `--share` of a step. Passes with more
completions take longer, so that this, too, is more than an engine gains.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.common.lengths import lengths
from benchmarks.common.runs import about, append

MODULE = "benchmarks.generation.ngrams"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORTEST, LONGEST = 2, 4  # n-grams that are looked for
QUESTIONS = [
    "A shop sells {a} apples a day at {b} cents each. Explain step by step what it earns in {c} weeks, then check it.",
    "Write a Python function that returns the {a} largest of {b} numbers, and explain every line of it in detail.",
    "A train leaves at {c} o'clock, goes {a} km at {b} km/h, waits, and goes back. Explain each step to its arrival.",
    "List {c} rules for a fair game of {b} cards among {a} players, and give a reason for each of them.",
]
LATE = 256
"""Tokens after which those of an answer are counted once more: the last running completions are the long ones."""


class Passes(NamedTuple):
    """Tokens that were sampled, and the passes of the model which yield them."""

    tokens: int
    passes: int

    @property
    def tokens_of_a_pass(self) -> float:
        return self.tokens / self.passes


@click.command(help=__doc__)
@click.option("--model", default=MODEL, show_default=True)
@click.option("--answers", default=64, show_default=True)
@click.option("--tokens", default=512, show_default=True, help="Most of an answer.")
@click.option("--few", default=8, show_default=True, help="Running completions from which drafts are used.")
@click.option("--share", default=0.83, show_default=True, help="Of a step: sampling.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("ngrams.jsonl"), show_default=True)
def main(model: str, answers: int, tokens: int, few: int, share: float, output: Path) -> None:
    sampled = sample(model, answers, tokens)
    lasting = [len(answer) for _, answer in sampled]
    shape = {"model": model, "answers": answers, "tokens": tokens, "few": few, "share": share}
    line: dict[str, Any] = shape | {"median_tokens": statistics.median(lasting), "all_tokens": sum(lasting)}
    for draft in (1, 2, 4, 8):
        whole = total([replay(prompt, answer, draft) for prompt, answer in sampled])
        late = total([replay(prompt, answer, draft, LATE) for prompt, answer in sampled if len(answer) > LATE])
        line[f"draft_{draft}"] = {
            "tokens_of_a_pass": round(whole.tokens_of_a_pass, 3),
            "tokens_of_a_late_pass": round(late.tokens_of_a_pass, 3),
            "late_tokens": late.tokens,
            "most_of_a_step": round(speedup(lengths("lognormal"), few, late.tokens_of_a_pass, share), 3),
        }
    append(output, line | about(MODULE, **shape))
    print(json.dumps(line, indent=1))


def sample(model: str, answers: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of prompts, and those of answers sampled at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draw = np.random.default_rng(0)
    found = []
    for question in QUESTIONS:
        texts = [
            question.format(a=draw.integers(3, 40), b=draw.integers(20, 99), c=draw.integers(3, 9))
            for _ in range(-(-answers // len(QUESTIONS)))
        ]
        chats = [[{"role": "user", "content": text}] for text in texts]
        batch = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        out = loaded.generate(**batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=most)
        width = batch["input_ids"].shape[1]
        for row, mask in zip(out.tolist(), batch["attention_mask"].tolist(), strict=True):
            prompt = [token for token, own in zip(row[:width], mask, strict=True) if own]
            answer = row[width:]
            end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
            found.append((prompt, answer[:end]))
    return found[:answers]


def replay(prompt: Sequence[int], answer: Sequence[int], draft: int, begin: int = 0) -> Passes:
    """Return the passes that yield an answer from a token on, with drafts of at most so many tokens."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose

    text = np.array([*prompt, *answer], dtype=np.int32)
    position, passes = len(prompt) + begin, 0
    while position < len(text):
        proposed = propose(text[:position], SHORTEST, LONGEST, len(text) + draft, draft)
        there = text[position : position + len(proposed)]
        same = proposed[: len(there)] == there
        accepted = len(same) if same.all() else int(same.argmin())
        position, passes = position + accepted + 1, passes + 1  # and one more token of the model's own
    return Passes(len(answer) - begin, passes)


def total(each: Sequence[Passes]) -> Passes:
    """Return the sum over answers."""
    return Passes(sum(one.tokens for one in each), sum(one.passes for one in each))


def speedup(completions: Sequence[int], few: int, tokens_of_a_pass: float, share: float) -> float:
    """Return how many times faster a step is at most, if passes with at most `few` completions yield more tokens."""
    longest = sorted(completions, reverse=True)
    end, tail = longest[0], longest[0] - longest[few]
    left = (end - tail + tail / tokens_of_a_pass) / end
    return 1 / (1 - share + share * left)


if __name__ == "__main__":
    main()
