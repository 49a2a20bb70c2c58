"""An episode as far as it has been sampled: turns of the model, and between them what tools have answered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_workload.algorithm.samples import Completion, Episode, Fork, Message, length
from grpo_workload.environments.base import ToolCall, ToolResult

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A turn to sample: what the engine reads, and how many tokens it may add."""

    token_ids: list[int]  # of the prompt, and of the completion so far
    num_tokens: int  # of the completion so far, in all its sequences: no two turns of an episode begin with the same
    max_tokens: int
    seed: int  # the prompt's
    number: int  # of the sample, among those of its prompt


@dataclass(slots=True, kw_only=True)
class Turn:
    """The part of a turn that the engine has sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled its tokens, ascending
    finish_reason: FinishReason | None = None  # None: not finished


@dataclass(slots=True, kw_only=True)
class EpisodeDraft:
    """One episode so far."""

    room: int  # the most tokens that its completion may have
    prompt_ids: tuple[int, ...]  # with what `reset` returned
    observation: str = ""
    asked: tuple[Message, ...] = ()  # a program's first request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    context: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    text: str = ""  # of the last turn
    num_turns: int = 0
    num_calls: int = 0
    num_failed_calls: int = 0
    call_seconds: float = 0.0

    def ask(self, seed: int, number: int) -> Ask:
        """Return the next turn to sample."""
        num_tokens = len(self.token_ids)
        return Ask(
            token_ids=[*self.prompt_ids, *self.token_ids],
            num_tokens=num_tokens,
            max_tokens=self.room - num_tokens,
            seed=seed,
            number=number,
        )

    @property
    def num_own(self) -> int:
        """Number of tokens that were sampled here."""
        return len(self.token_ids) - length(self.context)

    def forked(self, num_tokens: int, num_messages: int) -> EpisodeDraft:
        """Return a draft that begins as this one did: all of it is context there."""
        return EpisodeDraft(
            room=self.room,
            prompt_ids=self.prompt_ids,
            asked=self.asked,
            token_ids=self.token_ids[:num_tokens],
            logprobs=[0.0] * num_tokens,
            context=[(0, num_tokens)],
            messages=self.messages[:num_messages],
        )

    @property
    def num_iterations(self) -> int:
        """Number of turns whose calls were answered."""
        return len(self.context)

    def add_turn(self, turn: Turn, text: str, content: str, calls: Sequence[ToolCall]) -> None:
        """Add a turn that the model has ended, as text with its calls, without them, and the calls."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.versions += turn.versions
        self.num_turns += 1
        self.text = text
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [_as_message(call) for call in calls]
        self.messages.append(message)

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Count what calls have answered, whether or not there is room for it."""
        self.num_calls += len(calls)
        self.num_failed_calls += sum(result.is_failed for result in results)

    def add_context(self, token_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Add tokens that the model reads; returns False, and adds none, if they leave no room for a turn."""
        begin = len(self.token_ids)
        if begin + len(token_ids) >= self.room:
            return False
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.context.append((begin, begin + len(token_ids)))
        self.messages += messages
        return True

    def complete(
        self,
        finish_reason: FinishReason,
        reward: float | None,
        state: bytes | None,
        *,
        retries: int,
        forks: Sequence[EpisodeDraft] = (),
        wait_seconds: float = 0.0,
    ) -> Completion:
        """Return the completion. `forks`: drafts of the same episode, which this one does not go on from."""
        drafts = (self, *forks)
        oldest = min(one.versions[0] for one in drafts)
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=self.text,
            finish_reason=finish_reason,
            weight_version=oldest,
            weight_updates=max(one.versions[-1] for one in drafts) - oldest,
            episode=Episode(
                messages=tuple(self.messages),
                context=tuple(self.context),
                prompt_ids=self.prompt_ids if self.observation or self.asked else None,
                observation=self.observation,
                asked=self.asked,
                forks=tuple(one._as_fork() for one in forks),
                num_turns=sum(one.num_turns for one in drafts),
                num_calls=sum(one.num_calls for one in drafts),
                num_failed_calls=self.num_failed_calls,
                call_seconds=self.call_seconds,
                wait_seconds=wait_seconds,
                retries=retries,
                reward=reward,
                state=state,
            ),
        )

    def _as_fork(self) -> Fork:
        return Fork(
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            context=tuple(self.context),
        )


def lost(cause: str, failure: str, version: int, retries: int) -> Completion:
    """Return the completion of an episode whose environment has failed too often: it has no tokens.

    `cause`: one of `environments.base.CAUSES`; `failure`: what happened the last time, for people.
    """
    return Completion(
        token_ids=(),
        logprobs=(),
        text="",
        finish_reason="stop",
        weight_version=version,
        episode=Episode(num_turns=0, retries=retries, lost=cause, failure=failure),
    )


def _as_message(call: ToolCall) -> dict[str, Any]:
    arguments = call.text if call.arguments is None else dict(call.arguments)
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}
