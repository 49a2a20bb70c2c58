"""Finds the parser of a model's calls: the one that reads back what the model's chat template writes."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_workload.environments.call_parser import (
    CallParser,
    Reader,
    template_reader,
    vllm_class,
    vllm_names,
    vllm_reader,
)
from grpo_workload.environments.chat_template import REFUSALS, USER, ChatTemplate, assistant

logger = logging.getLogger(__name__)

RESPONSE_TEMPLATE = "hf"
"""vLLM's name for the tokenizer's own response template; it is read with transformers."""

_NAME = "probe_tool"
_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "Text."},
                "number": {"type": "integer", "description": "A number."},
                "nested": {"type": "object", "description": "An object."},
            },
            "required": ["text"],
        },
    },
}
_FIRST: dict[str, Any] = {"text": "two words", "number": 42, "nested": {"list": [1, 2], "text": "x"}}
_PROBES: tuple[tuple[dict[str, Any], ...], ...] = ((_FIRST,), (_FIRST, {"text": "other"}))
"""Arguments of the calls of each turn that a parser must read back."""
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def find_parser(
    tokenizer: Any,
    name: str | None,
    schemas: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None = None,
    *,
    logs: bool = True,
) -> CallParser:
    """Return the parser `name`, or the one that reads back what the chat template writes.

    Args:
        tokenizer: one that no other thread uses meanwhile.
        name: generation.toolCallParser; None to look for it.
        schemas: all tools of the job.
        variables: dataset.chatTemplateKwargs.
        logs: log which one it is, and which others would do.

    Raises:
        ConfigError: there is no such parser, or none reads back what the template writes.
    """
    started, template = time.monotonic(), ChatTemplate(tokenizer, variables)
    if name is not None:
        reader = _named(template, name, schemas)
        if logs and not _reads(_named(template, name, [_SCHEMA]), _turns(template)):
            logger.warning("generation.toolCallParser: %s does not read calls as the chat template writes them", name)
        return CallParser(name, reader, _opening(template))
    turns = _turns(template)
    fitting = [one for one, reader in _readers(template, [_SCHEMA]) if _reads(reader, turns)]
    if not fitting:
        raise ConfigError(
            "generation.toolCallParser: no parser reads back the calls that the model's chat template writes, such as "
            f"{turns[0]!r}; set model.chatTemplate to a template whose form of calls vLLM knows, or "
            "generation.toolCallParser to the parser that reads what the model writes"
        )
    if logs:
        others = f" ({', '.join(fitting[1:])} would do, too)" if fitting[1:] else ""
        seconds = time.monotonic() - started
        logger.info("calls of tools are read by the parser %s%s; found in %.1f s", fitting[0], others, seconds)
    return CallParser(fitting[0], _named(template, fitting[0], schemas), _opening(template))


def _readers(template: ChatTemplate, schemas: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Reader]]:
    """Yield the parsers that can be made for a tokenizer: its response template first, then hermes, as most do."""
    names = [RESPONSE_TEMPLATE, "hermes", *vllm_names()]
    seen: set[type] = set()
    for name in dict.fromkeys(names):
        try:
            if name != RESPONSE_TEMPLATE:
                cls = vllm_class(name)
                if cls in seen:  # one under several names
                    continue
                seen.add(cls)
            yield name, _named(template, name, schemas)
        except Exception as error:  # packages that are missing, tokens that the tokenizer lacks
            logger.debug("the parser %s is not for this model: %s: %s", name, type(error).__name__, error)


def _named(template: ChatTemplate, name: str, schemas: Sequence[dict[str, Any]]) -> Reader:
    tokenizer = template.tokenizer
    if name == RESPONSE_TEMPLATE:
        if getattr(tokenizer, "response_template", None) is None:
            raise ConfigError(
                "generation.toolCallParser: hf reads calls by the tokenizer's response template, which "
                "this one does not have; name another parser, or leave it out"
            )
        return template_reader(tokenizer, template.text([USER], begins=True), schemas)
    if name not in vllm_names():
        raise ConfigError(f"generation.toolCallParser: vLLM has no parser {name!r}; it has {', '.join(vllm_names())}")
    try:
        return vllm_reader(vllm_class(name), tokenizer, schemas)
    except Exception as error:  # as above
        raise ConfigError(f"generation.toolCallParser: {name} is not for this model: {error}") from error


def _turns(template: ChatTemplate) -> list[str]:
    """Return turns with one call, and two if it can, as the template writes them. ConfigError if it does not."""
    turns: list[str] = []
    for calls in _PROBES:
        try:
            turns.append(template.turn(assistant([(_NAME, one) for one in calls]), [_SCHEMA]))
        except REFUSALS as error:
            if turns:  # Llama 3's writes one call a turn
                break
            raise ConfigError(f"model.chatTemplate: the chat template refuses calls of tools: {error}") from error
    if not all(_NAME in turn for turn in turns):
        raise ConfigError(
            "model.chatTemplate: the model's chat template leaves out calls of tools; set it to one that writes them"
        )
    return turns


def _reads(reader: Reader, turns: Sequence[str]) -> bool:
    try:
        if reader("Some words.")[1]:
            return False
        for turn, arguments in zip(turns, _PROBES, strict=False):
            read = [(name, json.loads(given)) for name, given in reader(turn)[1]]
            if read != [(_NAME, one) for one in arguments]:
                return False
    except Exception as error:  # any parser is tried, on text for another
        logger.debug("a parser does not read the turns: %s: %s", type(error).__name__, error)
        return False
    return True


def _opening(template: ChatTemplate) -> str | None:
    """Return the tag that begins a call and nothing else; None if there is none."""
    turn, plain = _turns(template)[0], template.turn({"role": "assistant", "content": "dummy"}, [_SCHEMA])
    tags = _TAG.findall(turn[: turn.index(_NAME)])
    return next((tag for tag in tags if tag not in plain and not tag.startswith("<think")), None)
