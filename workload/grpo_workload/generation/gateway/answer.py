"""A turn of the model as OpenAI's API writes it: whole, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grpo_workload.generation.gateway.conversation import Answer


def whole(answer: Answer, head: dict[str, Any]) -> dict[str, Any]:
    """Return a chat completion. `head`: id, created and model."""
    choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
    return head | {"object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, head: dict[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """Yield the events of a stream: it has been sampled, so each part comes whole."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        content = head | {"object": "chat.completion.chunk", "choices": choices} | more
        return f"data: {json.dumps(content)}\n\n".encode()

    def part(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])

    yield part({"role": "assistant", "content": answer.message["content"] or ""})
    if calls := answer.message.get("tool_calls"):
        yield part({"tool_calls": [one | {"index": place} for place, one in enumerate(calls)]})
    yield part({}, answer.finish_reason)
    if with_usage:
        yield event([], usage=_usage(answer))
    yield b"data: [DONE]\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
