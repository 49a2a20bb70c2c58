"""Messages of a program as tokens, and turns as messages: what the model's chat template says."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.samples import Message
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.call_parser import CallParser
from grpo_workload.environments.chat_template import ChatTemplate
from grpo_workload.environments.find_parser import find_parser
from grpo_workload.environments.turn_template import TurnTemplate

_MOST_PARSERS = 64
"""Parsers that are kept, each for some tools: a program may offer others in each episode."""


class ChatWords:
    """Reads and writes turns of one model for programs. One thread uses it."""

    def __init__(self, config: TrainerConfig, tokenizer: Any) -> None:
        """The tokenizer is copied: others may use it. ConfigError if its chat template cannot be used."""
        self._tokenizer = copy.deepcopy(tokenizer)
        self._variables = config.dataset.chat_template_kwargs
        self._template = ChatTemplate(self._tokenizer, self._variables)
        self._turns = TurnTemplate(self._tokenizer, self._variables)
        self._turns.check_reply()
        self._name = config.generation.tool_call_parser
        self._parsers: dict[str, CallParser] = {}  # by their tools

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return a conversation as token ids, with the beginning of the model's turn.

        Raises:
            REFUSALS: the chat template refuses it.
            ConfigError: see `read`.
        """
        if tools:
            self.parser(tools)  # an episode must not fail later for what is known now
        return self._template.ids(messages, [*tools] or None, begins=True)

    def reply(self, last: int, messages: Sequence[Message], called: str | None) -> list[int]:
        """Return what messages put between two turns: see `TurnTemplate.reply`."""
        return self._turns.reply(last, messages, called)

    def read(self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> tuple[str, str, list[ToolCall]]:
        """Return a turn's text, the text without its calls, and the calls: none without tools.

        Raises:
            ConfigError: the chat template writes no calls, or no parser reads what it writes.
        """
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        if not tools:
            return text, text, []
        whole = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        content, calls = self.parser(tools).parse(self._template.without_end(whole))
        return text, content if calls else text, calls

    def parser(self, tools: Sequence[dict[str, Any]]) -> CallParser:
        """Return the parser of calls of these tools; raises as `read`."""
        key = json.dumps(tools)
        if key not in self._parsers:
            if not self._parsers:
                self._turns.check()
            found = find_parser(self._tokenizer, self._name, tools, self._variables, logs=not self._parsers)
            self._name = found.name
            if len(self._parsers) >= _MOST_PARSERS:
                del self._parsers[next(iter(self._parsers))]
            self._parsers[key] = found
        return self._parsers[key]
