"""OpenAI's chat completions: a request, and a turn of the model whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grpo_spec.training import TrainingConfig
from grpo_workload.generation.gateway.conversation import Answer
from grpo_workload.generation.gateway.request import ChatRequest, read_request


class Chat:
    """One request of the API, and what it gets."""

    def __init__(self, training: TrainingConfig, model: str, head: dict[str, Any]) -> None:
        """`head`: id and created."""
        self._training, self._model = training, model
        self._head = {"id": f"chatcmpl-{head['id']}", "created": head["created"], "model": model}
        self._with_usage = False

    def read(self, body: Any) -> ChatRequest:
        """Return the request; see `read_request`."""
        asked = read_request(body, self._training, self._model)
        self._with_usage = asked.with_usage
        return asked

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a chat completion."""
        choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the events of a stream: it has been sampled, so each part comes whole."""

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            content = self._head | {"object": "chat.completion.chunk", "choices": choices} | more
            return f"data: {json.dumps(content)}\n\n".encode()

        def part(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            return event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])

        yield part({"role": "assistant", "content": answer.message["content"] or ""})
        if calls := answer.message.get("tool_calls"):
            yield part({"tool_calls": [one | {"index": place} for place, one in enumerate(calls)]})
        yield part({}, answer.finish_reason)
        if self._with_usage:
            yield event([], usage=_usage(answer))
        yield b"data: [DONE]\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
