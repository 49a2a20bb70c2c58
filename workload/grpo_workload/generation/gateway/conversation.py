"""The one conversation of an episode that a program plays: each request goes on from the tokens so far. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from grpo_workload.algorithm.samples import Completion, Message
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.chat_template import REFUSALS
from grpo_workload.generation.episode_draft import Ask, EpisodeDraft, FinishReason, Turn
from grpo_workload.generation.gateway.refusal import CONTEXT_LENGTH, HISTORY, RefusalError
from grpo_workload.generation.gateway.request import ChatRequest, call, differs


class Words(Protocol):
    """Messages and turns as tokens: see `environments.chat_words.ChatWords`."""

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return a conversation as token ids, with the beginning of the model's turn; raises REFUSALS."""
        ...

    def reply(self, last: int, messages: Sequence[Message], called: str | None) -> list[int]:
        """Return what messages put between a turn, whose last token is `last`, and the next; raises REFUSALS.

        `called`: a tool that the turn has called.
        """
        ...

    def read(self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> tuple[str, str, list[ToolCall]]:
        """Return a turn's text, the text without its calls, and the calls."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn of the model, as OpenAI's API writes it."""

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Conversation:
    """What an episode has so far. A request is asked with `ask`, and then answered with `add`."""

    def __init__(self, words: Words, room: int, max_prompt_tokens: int | None) -> None:
        """`room`: the most tokens of a completion, sampled or read; `max_prompt_tokens`: of the first request."""
        self._words, self._room, self._max_prompt_tokens = words, room, max_prompt_tokens
        self._draft: EpisodeDraft | None = None
        self._request: ChatRequest | None = None  # that is asked, or was last
        self._history: list[Message] = []  # all messages so far, with the model's
        self._context: tuple[list[int], list[Message]] = ([], [])  # what the request puts behind the last turn
        self._last: FinishReason = "stop"  # of the last turn

    @property
    def num_turns(self) -> int:
        """Number of answers so far."""
        return self._draft.num_turns if self._draft else 0

    def ask(self, request: ChatRequest, seed: int, number: int) -> Ask:
        """Return the turn that a request asks for.

        Args:
            request: the program's.
            seed: the prompt's.
            number: of the episode among those of its prompt.

        Raises:
            RefusalError: there is no room for it, it does not continue the conversation, or the template refuses it.
            ConfigError: the model cannot use tools.
        """
        draft, token_ids = self._draft, list[int]()
        if draft is None or not draft.num_turns:
            self._draft = draft = self._begun(request)
        else:
            token_ids = self._continued(draft, request)
        own = draft.ask(seed, number)
        most = own.max_tokens - len(token_ids)
        if most < 1:
            used = len(draft.token_ids) + len(token_ids)
            raise _too_long(f"the conversation would have {used} tokens behind its first request, and", self._room)
        self._request = request
        return replace(
            own,
            token_ids=[*own.token_ids, *token_ids],
            num_tokens=own.num_tokens + len(token_ids),
            max_tokens=most if request.max_tokens is None else min(most, request.max_tokens),
        )

    def add(self, turn: Turn) -> Answer:
        """Add the turn that was asked for, and return the answer. ConfigError if the model cannot use tools."""
        draft, request = self._draft, self._request
        assert draft is not None
        assert request is not None
        assert turn.finish_reason is not None
        num_read = len(draft.prompt_ids) + len(draft.token_ids) + len(self._context[0])
        # What was cut is no call, whatever it looks like.
        tools = request.tools if turn.finish_reason == "stop" else []
        text, content, found = self._words.read(turn.token_ids, tools)
        if not all(one.name for one in found):  # a malformed call without a name cannot be told as one
            content, found = text, []
        if self._context[0]:
            is_added = draft.add_context(*self._context)
            assert is_added, "`ask` has looked for room"
        calls: list[dict[str, Any]] = [
            {
                "id": f"call_{draft.num_calls + place}",
                "type": "function",
                "function": {"name": one.name, "arguments": _arguments(one)},
            }
            for place, one in enumerate(found)
        ]
        draft.num_calls += len(calls)
        draft.add_turn(turn, text, content, found)
        self._last = turn.finish_reason
        own: Message = {"role": "assistant", "content": content}
        if calls:
            own["tool_calls"] = [call(one["id"], one["function"]) for one in calls]
        self._history = [*request.messages, own]
        return Answer(
            message={"role": "assistant", "content": content if content or not calls else None}
            | ({"tool_calls": calls} if calls else {}),
            finish_reason="tool_calls" if calls else turn.finish_reason,
            prompt_tokens=num_read,
            completion_tokens=len(turn.token_ids),
        )

    def complete(self, reward: float | None, seconds: float, *, is_over: bool, retries: int) -> Completion:
        """Return the completion of an episode with at least one turn.

        Args:
            reward: what the program returned.
            seconds: that the program took, without those of the model.
            is_over: whether a request was refused for lack of tokens or time.
            retries: how often it began again.
        """
        assert self._draft is not None
        self._draft.call_seconds = seconds
        return self._draft.complete("length" if is_over else self._last, reward, None, retries=retries)

    def _begun(self, request: ChatRequest) -> EpisodeDraft:
        if request.messages[-1]["role"] == "assistant":
            raise _no_prefill(len(request.messages) - 1)
        try:
            prompt_ids = self._words.begin(request.messages, request.tools)
        except REFUSALS as error:
            raise _template(error) from error
        if (most := self._max_prompt_tokens) is not None and len(prompt_ids) > most:
            raise _too_long(f"the request has {len(prompt_ids)} tokens, and beside its completion", most)
        return EpisodeDraft(room=self._room, prompt_ids=tuple(prompt_ids), asked=tuple(request.messages))

    def _continued(self, draft: EpisodeDraft, request: ChatRequest) -> list[int]:
        assert self._request is not None
        if (place := differs(self._history, request.messages)) is not None:
            raise _history(f"messages[{place}] is not what it was, so the request continues nothing", place)
        if request.tools != self._request.tools:
            raise _history("tools are not those of the requests before", None)
        if not (new := request.messages[len(self._history) :]):
            raise _no_prefill(len(self._history) - 1)
        strange = [place for place, one in enumerate(new, len(self._history)) if one["role"] == "assistant"]
        if strange:
            raise _history(f"messages[{strange[0]}] is the model's, which has not answered so", strange[0])
        calls = {one["id"]: one["function"]["name"] for one in self._history[-1].get("tool_calls", ())}
        messages = [_named(one, calls, place) for place, one in enumerate(new, len(self._history))]
        try:
            token_ids = self._words.reply(draft.token_ids[-1], messages, next(iter(calls.values()), None))
        except REFUSALS as error:
            raise _template(error) from error
        self._context = token_ids, messages
        return token_ids


def _arguments(one: ToolCall) -> str:
    return one.text if one.arguments is None else json.dumps(dict(one.arguments), ensure_ascii=False)


def _named(message: Message, calls: dict[str, str], place: int) -> Message:
    """Return a message as chat templates write it: results of tools have the tool's name."""
    kept: Message = {name: message[name] for name in ("role", "name", "content") if name in message}
    if message["role"] == "tool" and "name" not in kept:
        if (name := calls.get(message.get("tool_call_id", ""))) is None:
            text = f"messages[{place}].tool_call_id names none of the calls in the answer before it"
            raise RefusalError(text, code="invalid_value", param=f"messages[{place}].tool_call_id")
        return {"role": "tool", "name": name, "content": message["content"]}
    return kept


def _history(what: str, place: int | None) -> RefusalError:
    rule = "an episode is one conversation: each request has the messages before it, the model's answer, and new ones"
    return RefusalError(f"{what}; {rule}", code=HISTORY, param="tools" if place is None else f"messages[{place}]")


def _no_prefill(place: int) -> RefusalError:
    text = f"messages[{place}], the last one, is the model's: it begins its own turns"
    return RefusalError(text, code="invalid_value", param=f"messages[{place}]")


def _template(error: Exception) -> RefusalError:
    return RefusalError(
        f"the model's chat template refuses the messages: {error}", code="invalid_value", param="messages"
    )


def _too_long(what: str, most: int) -> RefusalError:
    text = f"{what} training.maxCompletionLength leaves {most}: the maximum context length is exceeded"
    return RefusalError(text, code=CONTEXT_LENGTH, param="messages")
