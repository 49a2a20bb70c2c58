"""OpenAI's Responses API: its requests as chat completions, and a turn of the model as a response or its events. Pure.

A response is kept for `previous_response_id` until its episode ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_spec.training import TrainingConfig
from grpo_workload.generation.gateway.conversation import Answer
from grpo_workload.generation.gateway.refusal import RefusalError
from grpo_workload.generation.gateway.request import ChatRequest, read_request

_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
}
"""Parameters that a request may only set to what they are anyway."""
_CHATS = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
_OWN = {"input", "instructions", "previous_response_id", "max_output_tokens", "stream_options", "tools"}
_TEXTS = ("input_text", "output_text", "text")

Kept = dict[str, list[dict[str, Any]]]
"""Messages up to the end of a response, without instructions, by its id."""


class Responses:
    """One request of the API, and what it gets."""

    def __init__(self, training: TrainingConfig, model: str, kept: Kept, head: dict[str, Any]) -> None:
        """`kept`: of the episode; `head`: id and created."""
        self._training, self._model, self._kept = training, model, kept
        self._head = {"id": f"resp_{head['id']}", "object": "response", "created_at": head["created"]}
        self._messages: list[dict[str, Any]] = []
        self._body: Mapping[str, Any] = {}

    def read(self, body: Any) -> ChatRequest:
        """Return the request; raises RefusalError as `read_request` does."""
        if not isinstance(body, dict):
            raise RefusalError("the body must be a JSON object", code="invalid_value")
        self._body = given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name in _CHATS:
                raise _refusal(f"{name} is for chat completions; responses have {_CHATS[name]}", name)
            if name in _ONLY and value not in _ONLY[name]:
                raise _refusal(f"{name} can only be {json.dumps(_ONLY[name][0])} here: leave it out", name)
        self._messages = [*self._previous(given.get("previous_response_id")), *_messages(given.get("input"))]
        instructions = given.get("instructions", "")
        system = [{"role": "system", "content": _text(instructions, "instructions")}] if instructions else []
        chat = {name: value for name, value in given.items() if name not in _ONLY and name not in _OWN}
        chat |= {"messages": [*system, *self._messages], "max_tokens": given.get("max_output_tokens")}
        if isinstance(tools := given.get("tools", []), list):
            tools = [*map(_tool, tools)]
        return read_request(chat | {"tools": tools}, self._training, self._model)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a response, and keep it."""
        self._kept[self._head["id"]] = [*self._messages, answer.message]
        is_cut = answer.finish_reason == "length"
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*self._items(answer)],
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the events of a stream: it has been sampled, so each part comes whole."""
        for number, (kind, more) in enumerate(self._events(answer)):
            content = {"type": kind, "sequence_number": number} | more
            yield f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode()

    def _events(self, answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
        response, begun = self.whole(answer), self._response("in_progress")
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for place, item in enumerate(response["output"]):
            at = {"item_id": item["id"], "output_index": place}
            empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
            added = item | empty | {"status": "in_progress"}
            yield "response.output_item.added", {"output_index": place, "item": added}
            if item["type"] == "message":
                (part,) = item["content"]
                at |= {"content_index": 0}
                yield "response.content_part.added", at | {"part": part | {"text": ""}}
                yield "response.output_text.delta", at | {"delta": part["text"], "logprobs": []}
                yield "response.output_text.done", at | {"text": part["text"], "logprobs": []}
                yield "response.content_part.done", at | {"part": part}
            else:
                said = {"arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.delta", at | {"delta": item["arguments"]}
                yield "response.function_call_arguments.done", at | said
            yield "response.output_item.done", {"output_index": place, "item": item}
        yield f"response.{response['status']}", {"response": response}

    def _response(self, status: str) -> dict[str, Any]:
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._body.get("instructions"),
            "max_output_tokens": self._body.get("max_output_tokens"),
            "metadata": self._body.get("metadata", {}),
            "model": self._model,
            "output": [],
            "parallel_tool_calls": self._body.get("parallel_tool_calls", True),
            "previous_response_id": self._body.get("previous_response_id"),
            "temperature": self._training.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": self._body.get("tools", []),
            "top_p": self._training.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _items(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yield a turn as items: the program sends them back as input, or names the response."""
        name, status = self._head["id"], "incomplete" if answer.finish_reason == "length" else "completed"
        if (text := answer.message["content"]) is not None:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            own = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}
            yield own
        for one in answer.message.get("tool_calls", ()):
            about = {"id": f"fc_{name}_{one['id']}", "type": "function_call", "status": status}
            yield about | {"call_id": one["id"], **one["function"]}

    def _previous(self, name: Any) -> list[dict[str, Any]]:
        if name is None:
            return []
        if not isinstance(name, str) or name not in self._kept:
            text = f"this episode has no response {name!r}"
            raise RefusalError(text, code="previous_response_not_found", param="previous_response_id")
        return self._kept[name]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return an input as messages: calls belong to the turn of the model that they stand behind."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not (isinstance(given, list) and given):
        raise _refusal("input must be a text or a list of items", "input")
    found: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            found.append({"role": item["role"], "content": _text(item.get("content"), where)})
        elif kind == "function_call" and {"call_id", "name", "arguments"} <= item.keys():
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            found[-1] = found[-1] | {"tool_calls": [*found[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output" and isinstance(item.get("call_id"), str):
            said = {"tool_call_id": item["call_id"], "content": _text(item.get("output"), where)}
            found.append({"role": "tool"} | said)
        else:
            raise _refusal(f"{where} must be a message, a function_call or a function_call_output", where)
    return found


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(one, dict) and one.get("type") in _TEXTS and isinstance(one.get("text"), str) for one in content
    ):
        return "".join(one["text"] for one in content)
    raise _refusal(f"{where} must be text: this job's model reads nothing else here", where)


def _tool(tool: Any) -> Any:
    """Return a tool as chat completions have it; `strict` would be another distribution, and is not followed."""
    if not (isinstance(tool, dict) and tool.get("type") == "function"):
        return tool  # is refused
    kept = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


def _refusal(message: str, param: str) -> RefusalError:
    return RefusalError(message, code="unsupported_parameter", param=param)
