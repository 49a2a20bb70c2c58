"""An episode that a program plays, so far: each request goes on from tokens that were sampled or read. Pure.

A request whose messages go on from a turn of the model gets the tokens up to that turn, as they were. If another turn
has followed there, it begins a fork: a further sequence, which has those tokens as context. A request that goes on from
no turn (of another agent, or after the history was edited or made shorter) begins a sequence with its own messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_workload.algorithm.samples import Completion, Message
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.chat_template import REFUSALS
from grpo_workload.generation.episode_draft import Ask, EpisodeDraft, FinishReason, Turn
from grpo_workload.generation.gateway.refusal import RefusalError, no_prefill, template, too_long
from grpo_workload.generation.gateway.request import ChatRequest, call, num_shared


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


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A draft with what the program knows of it."""

    draft: EpisodeDraft
    tools: list[dict[str, Any]]
    history: list[Message] = field(default_factory=list)  # all messages so far, with the model's
    turns: list[tuple[int, int, int]] = field(default_factory=list)  # messages, tokens and the draft's messages by then


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A turn that is asked for."""

    request: ChatRequest
    sequence: _Sequence
    context: tuple[list[int], list[Message]]  # what the request puts behind the last turn


class Conversation:
    """An episode so far. A request is asked with `ask`, and then answered with `add`."""

    def __init__(self, words: Words, room: int, max_prompt_tokens: int | None) -> None:
        """Begin nothing yet.

        Args:
            words: messages as tokens.
            room: the most tokens of a sequence, sampled or read, and of all of them, sampled.
            max_prompt_tokens: of the first request.
        """
        self._words, self._room, self._max_prompt_tokens = words, room, max_prompt_tokens
        self._sequences: list[_Sequence] = []  # the one that was answered last is at the end
        self._asked: _Asked | None = None
        self._last: FinishReason = "stop"  # of the last turn

    @property
    def num_turns(self) -> int:
        """Number of answers so far."""
        return sum(one.draft.num_turns for one in self._sequences)

    def ask(self, request: ChatRequest, seed: int, number: int) -> Ask:
        """Return the turn that a request asks for.

        Args:
            request: the program's.
            seed: the prompt's.
            number: of the episode among those of its prompt.

        Raises:
            RefusalError: there is no room for it, or the template refuses it.
            ConfigError: the model cannot use tools.
        """
        if request.messages[-1]["role"] == "assistant":
            raise no_prefill(len(request.messages) - 1)
        asked = self._continued(request) or self._begun(request)
        draft, token_ids = asked.sequence.draft, asked.context[0]
        drafts = [one.draft for one in self._sequences if one is not asked.sequence]
        used = len(draft.token_ids) + len(token_ids)
        if draft.room - used < 1:
            raise too_long(f"the conversation would have {used} tokens behind its first request, and", draft.room)
        sampled = sum(one.num_own for one in (draft, *drafts))
        if self._room - sampled < 1:
            raise too_long(f"the model has written {sampled} tokens in this episode, and", self._room)
        self._asked = asked
        most = min(draft.room - used, self._room - sampled)
        return Ask(
            token_ids=[*draft.prompt_ids, *draft.token_ids, *token_ids],
            num_tokens=used + sum(len(one.token_ids) for one in drafts),
            max_tokens=most if request.max_tokens is None else min(most, request.max_tokens),
            seed=seed,
            number=number,
        )

    def add(self, turn: Turn) -> Answer:
        """Add the turn that was asked for, and return the answer. ConfigError if the model cannot use tools."""
        assert self._asked is not None
        assert turn.finish_reason is not None
        request, sequence, context = self._asked.request, self._asked.sequence, self._asked.context
        draft = sequence.draft
        num_read = len(draft.prompt_ids) + len(draft.token_ids) + len(context[0])
        # What was cut is no call, whatever it looks like.
        tools = request.tools if turn.finish_reason == "stop" else []
        text, content, found = self._words.read(turn.token_ids, tools)
        if not all(one.name for one in found):  # a malformed call without a name cannot be told as one
            content, found = text, []
        if request.with_one_call:
            found = found[:1]
        if context[0]:
            is_added = draft.add_context(*context)
            assert is_added, "`ask` has looked for room"
        num_calls = sum(one.draft.num_calls for one in self._sequences)
        calls: list[dict[str, Any]] = [
            {
                "id": f"call_{num_calls + place}",
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
        sequence.history = [*request.messages, own]
        sequence.turns.append((len(sequence.history), len(draft.token_ids), len(draft.messages)))
        self._sequences = [*(one for one in self._sequences if one is not sequence), sequence]
        return Answer(
            message={"role": "assistant", "content": content if content or not calls else None}
            | ({"tool_calls": calls} if calls else {}),
            finish_reason="tool_calls" if calls else turn.finish_reason,
            prompt_tokens=num_read,
            completion_tokens=len(turn.token_ids),
        )

    def complete(self, reward: float | None, seconds: float, *, is_over: bool, retries: int) -> Completion:
        """Return the completion of an episode with at least one turn: its own sequence is that of the last turn.

        Args:
            reward: what the program returned.
            seconds: that the program took, without those of the model.
            is_over: whether a request was refused for lack of tokens or time.
            retries: how often it began again.
        """
        *forks, draft = (one.draft for one in self._sequences)
        draft.call_seconds = seconds
        return draft.complete("length" if is_over else self._last, reward, None, retries=retries, forks=forks)

    def _begun(self, request: ChatRequest) -> _Asked:
        try:
            prompt_ids = self._words.begin(request.messages, request.tools)
        except REFUSALS as error:
            raise template(error) from error
        room, count = self._room, len(prompt_ids)
        if (most := self._max_prompt_tokens) is not None and count > most:
            room -= count - most  # a later request, of a long history, may take of its completion's room
            if not self._sequences or room < 1:
                raise too_long(f"the request has {count} tokens, and beside its completion", most)
        draft = EpisodeDraft(room=room, prompt_ids=tuple(prompt_ids), asked=tuple(request.messages))
        return _Asked(request=request, sequence=_Sequence(draft=draft, tools=request.tools), context=([], []))

    def _continued(self, request: ChatRequest) -> _Asked | None:
        """Go on from the turn behind which most of the request's messages came; None if it goes on from none."""
        # Behind a turn of the model that the request has from elsewhere, none of ours goes on.
        least = 1 + max((place for place, one in enumerate(request.messages) if one["role"] == "assistant"), default=-1)
        found = max(
            (
                (turn[0], turn is sequence.turns[-1], place, turn)
                for place, sequence in enumerate(self._sequences)
                if sequence.tools == request.tools
                for shared in (num_shared(sequence.history, request.messages),)
                for turn in sequence.turns
                if least <= turn[0] <= shared
            ),
            default=None,
        )
        if found is None:
            return None
        num_messages, is_last, place, turn = found
        sequence = self._sequences[place]
        answer = sequence.history[num_messages - 1]
        calls = {one["id"]: one["function"]["name"] for one in answer.get("tool_calls", ())}
        new = enumerate(request.messages[num_messages:], num_messages)
        messages = [_named(one, calls, number) for number, one in new]
        try:
            token_ids = self._words.reply(
                sequence.draft.token_ids[turn[1] - 1], messages, next(iter(calls.values()), None)
            )
        except REFUSALS as error:
            raise template(error) from error
        if not is_last:
            at = sequence.turns.index(turn)
            sequence = _Sequence(
                draft=sequence.draft.forked(*turn[1:]), tools=sequence.tools, turns=sequence.turns[: at + 1]
            )
        return _Asked(request=request, sequence=sequence, context=(token_ids, messages))


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
