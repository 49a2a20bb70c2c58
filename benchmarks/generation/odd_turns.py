"""Turns of a model, and results of its tools, that may be anything: for `benchmarks.generation.prompt_ids`."""

from __future__ import annotations

import random
from typing import Any

from grpo_workload.data.observation import printable

PIECES = [
    *[
        "42",
        " ",
        "\n",
        "\t",
        "  \n\n",
        "two words",
        "{}",
        '{"name": "say"',
        "{{ x }}",
        "{% if %}",
        "\\u0041",
        "\x00\x1b",
    ],
    *[
        "ä",
        "e\u0301",
        "日本語",
        "🧑\u200d🚀",
        "\u202eabc",
        "\ufffd",
        "\ud800",
        "ﬁ",
        "<|im_end|>",
        "<|im_start|>assistant\n",
    ],
    *["<|eot_id|>", "<|endoftext|>", "<|observation|>", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>"],
    *["</think>", "<tool_response>", "</tool_response>", "<arg_key>", "<function=say>", "x" * 40, "1e999", "NaN"],
]
STOP = "STOP!"
"""`training.stop`: a turn that it ends lacks the token that ends a turn."""
OWN, ANSWER, MALFORMED = 0.005, 0.06, 0.12
"""Shares of turns: whatever the model samples, no call, and a call that is cut or altered."""


def odd_text(draw: random.Random) -> str:
    """Return any text: none at all, a few pieces, or a long one."""
    count = draw.choice([0, 1, 1, 1, 2, 3]) if draw.random() < 0.95 else draw.randrange(40)
    return "".join(draw.choices(PIECES, k=count))


class Odd:
    """An environment whose one method answers anything."""

    def reset(self, **row: object) -> str:
        """Return an observation of up to 20 characters."""
        self._draw = random.Random(random.random())
        return odd_text(self._draw)[: self._draw.choice([0, 20])]

    def say(self, text: str, number: int = 0, more: dict | None = None) -> str:
        """
        Say something.

        Args:
            text: What to say.
            number: A number.
            more: Anything.
        """
        if self._draw.random() < 0.1:
            raise ValueError(odd_text(self._draw))
        return odd_text(self._draw)


class OddModel:
    """Says what a model of a family could say: a few tokens that the engine samples, and then a call, or none."""

    def __init__(self, template: Any, ends: list[int], seed: int) -> None:
        """`template`: an `environments.chat_template.ChatTemplate`; `ends`: tokens that end a turn."""
        self._template, self._tokenizer, self._ends, self._draw = (
            template,
            template.tokenizer,
            ends,
            random.Random(seed),
        )

    def turn(self) -> list[int | None]:
        """Return the tokens of a turn, None in place of those that the engine samples; [] if it samples all."""
        draw = self._draw
        if (kind := draw.random()) < OWN:
            return []
        if kind < OWN + ANSWER:
            text = odd_text(draw)
        else:
            text = self.calling()
            if kind > 1 - MALFORMED:
                text = self._spoilt(text)
        text = printable(text)
        # Half of the time texts of special tokens in it are letters, as a user would have typed them.
        own = {"add_special_tokens": False, "split_special_tokens": draw.random() < 0.5}
        end = (
            [draw.choice(self._ends)]
            if draw.random() < 0.9
            else self._tokenizer(STOP, add_special_tokens=False).input_ids
        )
        return [None] * draw.choice([0, 0, 1, 4]) + self._tokenizer(text, **own).input_ids + end

    def calling(self) -> str:
        """Return a turn with calls."""
        draw = self._draw
        calls = [self._call() for _ in range(draw.choice([1, 1, 1, 2, 3]))]
        content = draw.choice(["", "", printable(odd_text(draw))[:20]])
        try:
            return str(self._template.turn({"role": "assistant", "content": content, "tool_calls": calls}))
        except Exception:  # Llama 3's template writes one call a turn
            return str(self._template.turn({"role": "assistant", "content": content, "tool_calls": calls[:1]}))

    def _call(self) -> dict[str, Any]:
        draw = self._draw
        arguments: dict[str, Any] = {"text": printable(odd_text(draw))[:30]}
        if draw.random() < 0.3:
            arguments["number"] = draw.choice([7, -1, "seven", 10**30])
        if draw.random() < 0.1:
            arguments["more"] = {"list": [1, [2], {}]}
        name = draw.choice(["say"] * 9 + ["shout"])
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def _spoilt(self, text: str) -> str:
        place = self._draw.randrange(len(text) + 1)
        return text[:place] + self._draw.choice(["", odd_text(self._draw)[:10] + text[place + 1 :]])
