"""A model's chat template, as episodes use it: renderings of small made-up conversations, as text and as tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from grpo_workload.algorithm.samples import Message

REFUSALS = (TemplateError, ValueError, TypeError)
"""Exceptions of templates for conversations that they do not write."""

USER: Message = {"role": "user", "content": "dummy"}


def assistant(calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = "") -> Message:
    """Return a turn of the model that calls tools, by name and arguments."""
    functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def result(name: str, content: str) -> Message:
    """Return the answer of a tool."""
    return {"role": "tool", "name": name, "content": content}


class ChatTemplate:
    """A tokenizer with the variables that a job gives to its chat template."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        """`variables`: dataset.chatTemplateKwargs."""
        self.tokenizer, self.variables = tokenizer, dict(variables or {})

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, begins: bool = False) -> str:
        """Return the conversation as text; `begins`: with the beginning of the model's next turn.

        Raises:
            REFUSALS: the template refuses it.
        """
        return str(self._render(messages, tools, begins, tokenize=False))

    def ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, begins: bool = False
    ) -> list[int]:
        """Return the conversation as token ids; see `text`."""
        return list(self._render(messages, tools, begins, tokenize=True))

    def turn(self, message: Message, tools: Sequence[Any] | None = None) -> str:
        """Return a turn of the model as the model would write it, without the tokens that end it; raises as `text`."""
        whole, begun = self.text([USER, message], tools), self.text([USER], tools, begins=True)
        same = 0
        while same < min(len(whole), len(begun)) and whole[same] == begun[same]:
            same += 1
        if same < len(begun):  # the prompt begins the turn in another way, for example with a thought: up to that line
            same = max(whole.rfind("\n", 0, same) + 1, len(self.text([USER], tools)))
        return self.without_end(whole[same:].rstrip())

    def without_end(self, text: str) -> str:
        """Return a turn's text without the tokens that end it."""
        for end in self._ends:
            text = text.removesuffix(end)
        return text

    @cached_property
    def special(self) -> dict[int, str]:
        """The tokenizer's special tokens by id, also those without a role."""
        return {index: token.content for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def _ends(self) -> list[str]:
        """The eos token, and the special token that the template puts behind a turn."""
        eos = self.tokenizer.eos_token
        try:
            whole = self.text([USER, {"role": "assistant", "content": "dummy"}]).rstrip()
        except REFUSALS:
            return [eos] if eos else []
        last = [token for token in self.special.values() if whole.endswith(token)]
        return [*last, *([eos] if eos and eos not in last else [])]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, begins: bool, *, tokenize: bool) -> Any:
        def render(some: list[Message]) -> Any:
            how = {"tokenize": tokenize, "return_dict": False, "add_generation_prompt": begins}
            return self.tokenizer.apply_chat_template(some, tools=tools, **how, **self.variables)

        try:
            return render([*messages])
        except TypeError:  # some templates, for example DeepSeek-V3's, add arguments to text
            return render([_as_text(message) for message in messages])


def _as_text(message: Message) -> Message:
    calls = message.get("tool_calls", [])
    written = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": written} if calls else message
