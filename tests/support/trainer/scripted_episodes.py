"""Episodes for a model of random weights: what is a call, and what it answers, follow from tokens and seeds alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_workload.algorithm.samples import Completion, Message, Prompt
from grpo_workload.environments.base import ToolCall, ToolResult
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.limits import Limits

RESULT = [3, 4, 5]
ENDS = {"stop_token_ids": list(range(7, 250, 6))}
"""Parameter of requests: tokens that end a turn, as random weights rarely sample the one that does."""


def scripted_episodes(max_tokens: int, max_prompt_tokens: int) -> Episodes:
    """Return episodes in which a turn with an even number of tokens is a call, which is answered with RESULT."""
    limits = Limits(
        max_tokens=max_tokens, max_prompt_tokens=max_prompt_tokens, max_iterations=None, seconds=60.0, retries=0
    )
    return Episodes(limits, Place(), Words())


def turns_of(completion: Completion) -> list[tuple[int, int]]:
    """Return the first token of each turn, and the one past its last."""
    assert completion.episode is not None
    bounds = [0, *(place for span in completion.episode.context for place in span), len(completion.token_ids)]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


class Words:
    """See `episodes.Words`."""

    def calls(self, token_ids: Sequence[int]) -> tuple[str, str, list[ToolCall]]:
        return "", "", [ToolCall(name="tool", arguments={})] if len(token_ids) % 2 == 0 else []

    def results(self, last: int, answers: Sequence[tuple[str, str]]) -> tuple[list[int], list[Message]]:
        return RESULT, [{"role": "tool", "name": name, "content": text} for name, text in answers]

    def observed(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        return (*prompt.token_ids, *text.encode())


class Place:
    """See `base.Sessions`. The column `seconds` says how long calls take: some return while ranks train."""

    def open(self, columns: Mapping[str, Any], seed: int) -> ScriptedSession:
        return ScriptedSession(seed, columns.get("seconds", 0.0))


class ScriptedSession:
    """See `base.Session`."""

    wait_seconds = 0.0

    def __init__(self, seed: int = 0, seconds: float = 0.0) -> None:
        self.seed, self.seconds = seed, seconds

    async def reset(self) -> str:
        return str(self.seed % 1000)

    async def call(self, calls: Sequence[ToolCall], seconds: float) -> list[ToolResult]:
        await asyncio.sleep(self.seconds)
        return [ToolResult(content="answer") for _ in calls]

    async def end(self) -> tuple[float | None, bytes | None]:
        return None, None

    async def close(self) -> None: ...
