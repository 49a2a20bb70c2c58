"""Calls and results as tokens, for episodes: what the model's chat template and the parser of its calls say."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.samples import Message, Prompt
from grpo_workload.data.observation import render_observed
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.chat_template import ChatTemplate, result
from grpo_workload.environments.find_parser import find_parser
from grpo_workload.environments.turn_template import TurnTemplate


class ModelWords:
    """Reads and writes turns of one model. One thread uses it, while others may use the tokenizer it came from."""

    def __init__(self, config: TrainerConfig, tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> None:
        """`schemas`: all tools of the job. ConfigError if the model's chat template or its parser cannot be used."""
        # Tokenizers refuse two threads at once ("Already borrowed"), and workers prepare prompts meanwhile.
        self._tokenizer = copy.deepcopy(tokenizer)
        variables = config.dataset.chat_template_kwargs
        self._turns, self._template = TurnTemplate(self._tokenizer, variables), ChatTemplate(self._tokenizer, variables)
        self._turns.check()
        self._parser = find_parser(self._tokenizer, config.generation.tool_call_parser, schemas, variables)
        self._most = config.episodes.max_tool_response_tokens

    def calls(self, token_ids: Sequence[int]) -> tuple[str, str, list[ToolCall]]:
        """Return a turn's text, the text without its calls, and the calls."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        whole = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        content, calls = self._parser.parse(self._template.without_end(whole))
        return text, content if calls else text, calls

    def results(self, last: int, answers: Sequence[tuple[str, str]]) -> tuple[list[int], list[Message]]:
        """Return the tokens between a turn, whose last token is `last`, and the next, and the results as messages.

        Args:
            last: what a stop text has ended lacks the token that ends a turn.
            answers: names of tools and what they have answered; what is too long is cut.
        """
        cut = [(name, self._turns.cut(text, self._most)) for name, text in answers]
        return self._turns.between(last, cut), [result(name, text) for name, text in cut]

    def observed(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """Return the prompt's tokens with `text` behind its last message."""
        return render_observed(self._tokenizer, prompt, text)
