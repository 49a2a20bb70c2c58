"""Calls in a turn's text, read with parsers of others: vLLM's, or transformers' response template.

What a model samples may be anything. A parser that cannot read it, or raises, has found no call; if the turn begins one
all the same, it is a malformed call, which the model is told about.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_workload.data.observation import printable
from grpo_workload.environments.base import ToolCall

logger = logging.getLogger(__name__)

_THOUGHT_END = "</think>"
_MOST_LEVELS = 64  # of arguments: what is nested more deeply neither pickles nor becomes a line of a file for sure

Reader = Callable[[str], tuple[str, list[tuple[str, str]]]]
"""Reads a turn: returns it without its calls, and the calls as names and arguments in JSON. It may raise anything."""


class CallParser:
    """Reads the calls of a turn."""

    def __init__(self, name: str, read: Reader, opening: str | None) -> None:
        """`name`: the parser's, for people; `opening`: text with which each call begins, and nothing else does."""
        self.name, self._read, self._opening = name, read, opening

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return a turn without its calls, and the calls. A malformed one has no arguments, and maybe no name.

        Args:
            text: the turn with its special tokens, without those that end it.
        """
        try:
            content, found = self._read(text)
        except Exception as error:  # parsers of others, on text that may be anything
            logger.debug("the parser %s: %s: %s", self.name, type(error).__name__, error)
            content, found = text, []
        at = -1 if found or self._opening is None else text.find(self._opening, text.find(_THOUGHT_END) + 1)
        if at >= 0:
            return text[:at], [ToolCall(name="", arguments=None, text=text[at:])]
        calls = [(printable(name), printable(given)) for name, given in found]
        return content, [ToolCall(name=name, arguments=_object(given), text=given) for name, given in calls]


def _object(text: str) -> Mapping[str, Any] | None:
    """Return the JSON object that a text is; None if it is none, or has what neither JSON nor files can hold."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        # Halves of surrogate pairs, which JSON can escape, and 1e999, which Python reads as infinity.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_deep(value) else None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        within = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not (level := [part for parts in within for part in parts]):
            return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def vllm_names() -> list[str]:
    """Return the names of vLLM's parsers, in its own order."""
    from vllm.tool_parsers import ToolParserManager  # late: it takes seconds

    return list(dict.fromkeys([*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers]))


def vllm_class(name: str) -> type:
    """Return the class of one of vLLM's parsers. It may raise anything, for example where a package is missing."""
    from vllm.tool_parsers import ToolParserManager

    found: type = ToolParserManager.get_tool_parser(name)
    # They log each text that they cannot read with a traceback. Models that learn to call write many of these. A level
    # would not do: vLLM sets those of its loggers when it builds an engine.
    for logs in [*logging.root.manager.loggerDict]:
        if logs.startswith(("vllm.tool_parsers.", "vllm.parser.")):
            logging.getLogger(logs).disabled = True
    return found


def vllm_reader(cls: type, tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> Reader:
    """Return a reader with one of vLLM's parsers, which may raise anything: some need tokens that others lack."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[], tools=[*schemas] or None, tool_choice="auto" if schemas else "none")
    parser = cls(tokenizer, request.tools)

    def read(text: str) -> tuple[str, list[tuple[str, str]]]:
        # As in vLLM's server, a thought is taken away before: in it, models write of calls that they do not make.
        before, end, after = text.partition(_THOUGHT_END)
        thought, said = (before + end, after) if end else ("", text)
        found = parser.extract_tool_calls(said, request)
        if not found.tools_called:
            return text, []
        return thought + (found.content or ""), [
            (call.function.name, call.function.arguments) for call in found.tool_calls
        ]

    return read


def template_reader(tokenizer: Any, before: str, schemas: Sequence[dict[str, Any]]) -> Reader:
    """Return a reader with the tokenizer's response template. `before`: the end of a prompt, which may begin a turn."""

    def read(text: str) -> tuple[str, list[tuple[str, str]]]:
        message = tokenizer.parse_response(text, prefix=before, tools=[*schemas] or None)
        functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
        found = [
            (str(function["name"]), json.dumps({} if (given := function.get("arguments")) is None else given))
            for function in functions
        ]
        return str(message.get("content") or ""), found

    return read
