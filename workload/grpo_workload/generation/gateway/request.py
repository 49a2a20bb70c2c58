"""A program's request, checked. Sampling must be the job's own: parameters that would change it are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import Message
from grpo_workload.data.observation import printable
from grpo_workload.generation.gateway.refusal import RefusalError

_OURS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of `training`, which a request may repeat."""
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Parameters that a request may only set to what they are anyway."""
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_READ = {"model", "messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "stream"}
_READ |= {"stream_options", "parallel_tool_calls"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS = ("role", "content", "name", "tool_calls", "tool_call_id")
"""Parts of a message that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for a turn of the model."""

    messages: list[Message]  # contents are texts; arguments of calls are objects where they are JSON objects
    tools: list[dict[str, Any]]
    max_tokens: int | None  # of the turn; None: as many as fit
    with_one_call: bool = False  # the answer has the first call of the turn alone, as vLLM answers it
    streams: bool = False
    with_usage: bool = False  # at the end of a stream


def read_request(body: Any, training: TrainingConfig, model: str) -> ChatRequest:
    """Return a request that is one of ours.

    Args:
        body: what the program has sent, as JSON.
        training: how tokens are sampled.
        model: the only model.

    Raises:
        RefusalError: it cannot be answered, or not with tokens of the policy that is trained.
    """
    if not isinstance(body, dict):
        raise _refusal("the body must be a JSON object", None)
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("model") != model:
        text = f"there is no model {given.get('model')!r} here; the one that is trained is {model!r}"
        raise RefusalError(text, code="model_not_found", param="model", status=404)
    _check_sampling(given, training)
    tools = given.get("tools", [])
    if not (isinstance(tools, list) and all(map(_is_tool, tools))):
        raise _refusal("tools must be a list of functions", "tools")
    if given.get("tool_choice", "auto") not in (("auto",) if tools else ("auto", "none")):
        raise _refusal("tool_choice must be auto: the model chooses", "tool_choice")
    messages = given.get("messages")
    if not (isinstance(messages, list) and messages):
        raise _refusal("messages must be a list of messages", "messages")
    options = given.get("stream_options")
    return ChatRequest(
        messages=[_message(message, f"messages[{place}]") for place, message in enumerate(messages)],
        tools=tools,
        max_tokens=_max_tokens(given),
        with_one_call=given.get("parallel_tool_calls") is False,
        streams=given.get("stream") is True,
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _check_sampling(given: Mapping[str, Any], training: TrainingConfig) -> None:
    for name, value in given.items():
        if name in _OURS:
            if value != (ours := getattr(training, name)):
                text = f"{name} is {ours:g} in this job's training, also for a program: leave it out"
                raise _refusal(text, name)
        elif name in _DEFAULTS:
            if value not in _DEFAULTS[name]:
                raise _refusal(f"{name} can only be {json.dumps(_DEFAULTS[name][0])} here: leave it out", name)
        elif name == "stop":
            if ([value] if isinstance(value, str) else value) not in ([], [*training.stop]):
                raise _refusal("stop is set for the whole job, by training.stop: leave it out", name)
        elif name not in (*_READ, *_IGNORED):
            raise _refusal(f"{name} is not supported here: leave it out", name)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    found = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in found):
        raise _refusal("max_tokens must be a number of tokens, at least 1", "max_tokens")
    return min(found, default=None)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _refusal(f"{where} must have a role: {', '.join(_ROLES)}", where)
    if unread := [name for name, value in message.items() if value and name not in _PARTS]:
        raise _refusal(f"{where}.{unread[0]} is not supported here: leave it out", f"{where}.{unread[0]}")
    found: Message = {"role": message["role"], "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if message.get(name):
            found[name] = printable(str(message[name]))
    if calls := message.get("tool_calls"):
        if not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise _refusal(f"{where}.tool_calls must be a list of calls of functions", where)
        found["tool_calls"] = [call(one.get("id"), one["function"]) for one in calls]
    return found


def call(index: Any, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as a part of a message: its arguments are an object, as chat templates expect, where they are."""
    arguments = function["arguments"]
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = arguments
    own = {"name": str(function["name"]), "arguments": found if isinstance(found, dict) else arguments}
    return {"id": index, "type": "function", "function": own}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return printable("".join(part["text"] for part in content))
    raise _refusal(f"{where}.content must be text: this job's model reads nothing else here", f"{where}.content")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(one: Any) -> bool:
    function = one.get("function") if isinstance(one, dict) else None
    return isinstance(function, dict) and {"name", "arguments"} <= function.keys()


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _refusal(message: str, param: str | None) -> RefusalError:
    code = "invalid_value" if param is None else "unsupported_parameter"
    return RefusalError(message, code=code, param=param)


def num_shared(earlier: Sequence[Message], now: Sequence[Message]) -> int:
    """Return the number of messages with which both histories begin.

    White space around a text is no difference: programs strip it.
    """
    pairs = enumerate(zip(map(_essence, earlier), map(_essence, now), strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(earlier), len(now)))


def _essence(message: Message) -> tuple[Any, ...]:
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls, message.get("tool_call_id")
