"""Plays an episode: the model's turns, the calls of tools in them, and the environment that it acts in.

Token ids go to the engine and come back from it; nothing is rendered again. A turn is what the engine samples for the
tokens before it, so the next request continues exactly what was sampled. Each episode goes on by itself: none waits for
the turn of another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Completion, Message, Prompt
from grpo_workload.environments.base import (
    HISTORY,
    EnvironmentLostError,
    EpisodeTimeoutError,
    Program,
    Session,
    Sessions,
    ToolCall,
    ToolResult,
)
from grpo_workload.generation.episode_draft import Ask, EpisodeDraft, FinishReason, Turn, lost
from grpo_workload.generation.gateway.programs import Programs
from grpo_workload.generation.limits import Limits

logger = logging.getLogger(__name__)

Sample = Callable[[Ask], Awaitable[Turn]]
"""Samples a turn to its end, however long that takes."""

BEAT_SECONDS = 1.0
LONGEST_PAUSE = 60.0
"""Seconds before an episode begins again, at most."""
pause = asyncio.sleep


class Words(Protocol):
    """Calls and results as tokens, by the model's chat template; one episode at a time uses it."""

    def calls(self, token_ids: Sequence[int]) -> tuple[str, str, list[ToolCall]]:
        """Return a turn's text, the text without its calls, and the calls."""
        ...

    def results(self, last: int, answers: Sequence[tuple[str, str]]) -> tuple[list[int], list[Message]]:
        """Return the tokens between a turn, whose last token is `last`, and the next, and the results as messages.

        Args:
            last: the turn's last token: what a stop text has ended lacks the token that ends a turn.
            answers: names of tools and what they have answered.
        """
        ...

    def observed(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """Return the prompt's tokens with `text` behind its last message."""
        ...


class Episodes:
    """Plays episodes of one rank, in one event loop."""

    def __init__(
        self, limits: Limits, sessions: Sessions, words: Words | None, programs: Programs | None = None
    ) -> None:
        """`words`: None where all rows have programs; `programs`: None where none has."""
        self._limits, self._sessions, self._words, self._programs = limits, sessions, words, programs

    async def play_group(
        self,
        prompt: Prompt,
        num_generations: int,
        sample: Sample,
        moved: Callable[[], None],
        version: Callable[[], int],
    ) -> list[Completion]:
        """Play the episodes of a prompt side by side; raises as `play`, after it has ended the others."""
        plays = [
            asyncio.ensure_future(self.play(prompt, number, sample, moved, version))
            for number in range(num_generations)
        ]
        try:
            return list(await asyncio.gather(*plays))
        finally:
            for one in plays:
                one.cancel()
            await asyncio.gather(*plays, return_exceptions=True)

    async def play(
        self, prompt: Prompt, number: int, sample: Sample, moved: Callable[[], None], version: Callable[[], int]
    ) -> Completion:
        """Play one episode to its end; one whose environment fails begins again, with the same seeds.

        Args:
            prompt: its prompt.
            number: its number among those of its prompt.
            sample: asks the engine.
            moved: is called now and then while calls take their time.
            version: returns the version of the engine's weights.

        Raises:
            ConfigError: what `reset` returned leaves no room.
            Exception: as `sample` does.
        """
        retries, waited = 0, 0.0
        while True:
            # As in TRL, `reset` gets the row with its prompt.
            row = {"prompt": prompt.text} | prompt.columns
            # The prompt's seed: all its completions begin in the same state, and draw the same numbers there.
            session = self._sessions.open(row, prompt.seed)
            try:
                if isinstance(session, Program):
                    assert self._programs is not None
                    return await self._programs.play(session, prompt, number, sample, moved, retries)
                return await self._once(prompt, number, sample, moved, session, retries, waited)
            except EnvironmentLostError as error:
                again = retries < self._limits.retries and error.cause != HISTORY  # which would be the same again
                logger.warning(
                    "episode %d of prompt %d %s: %s",
                    number,
                    prompt.index,
                    "begins again" if again else "is lost, and counts nowhere",
                    error,
                )
                if not again:
                    return lost(error.cause, str(error), version(), retries)
            finally:
                await session.close()
            waited += 0.0 if isinstance(session, Program) else session.wait_seconds
            async with _beating(moved):  # what has failed may come back meanwhile; others go on
                await pause(min(4.0**retries, LONGEST_PAUSE))
            retries += 1

    async def _once(
        self,
        prompt: Prompt,
        number: int,
        sample: Sample,
        moved: Callable[[], None],
        session: Session,
        retries: int,
        waited: float,
    ) -> Completion:
        async with _beating(moved):
            observation = await session.reset()
        draft = self._begin(prompt, observation)
        finish_reason = await self._turns(draft, prompt.seed, number, sample, moved, session)
        async with _beating(moved):
            reward, state = await session.end()
        wait_seconds = waited + session.wait_seconds
        return draft.complete(finish_reason, reward, state, retries=retries, wait_seconds=wait_seconds)

    @property
    def _model_words(self) -> Words:
        assert self._words is not None
        return self._words

    def _begin(self, prompt: Prompt, observation: str) -> EpisodeDraft:
        prompt_ids = self._model_words.observed(prompt, observation) if observation else prompt.token_ids
        most = self._limits.max_prompt_tokens
        if observation and most is not None and len(prompt_ids) > most:
            # An evaluation's dataset may have another setting, by which its row was cut.
            was_cut = prompt.is_overlong and len(prompt.token_ids) == most
            if self._limits.truncates_prompts or was_cut:
                return EpisodeDraft(
                    room=self._limits.max_tokens, prompt_ids=prompt_ids[-most:], observation=observation
                )
            raise ConfigError(
                f"environments: with what reset returned, prompt {prompt.index} of the dataset has {len(prompt_ids)} "
                f"tokens, and training.maxCompletionLength leaves {most}: return less, or raise generation.maxModelLen"
            )
        return EpisodeDraft(room=self._limits.max_tokens, prompt_ids=prompt_ids, observation=observation)

    async def _turns(
        self,
        draft: EpisodeDraft,
        seed: int,
        number: int,
        sample: Sample,
        moved: Callable[[], None],
        session: Session,
    ) -> FinishReason:
        while True:
            turn = await sample(draft.ask(seed, number))
            assert turn.finish_reason is not None
            text, content, calls = self._model_words.calls(turn.token_ids)
            if turn.finish_reason == "length":  # what was cut is no call, whatever it looks like
                draft.add_turn(turn, text, text, ())
                return "length"
            draft.add_turn(turn, text, content, calls)
            if not calls or draft.num_iterations == self._limits.max_iterations:
                return "stop"
            try:
                results = await self._call(draft, session, calls, moved)
            except EpisodeTimeoutError:
                return "length"
            draft.add_results(calls, results)
            answers = [(call.name, result.content) for call, result in zip(calls, results, strict=True)]
            if not draft.add_context(*self._model_words.results(turn.token_ids[-1], answers)):
                return "length"

    async def _call(
        self, draft: EpisodeDraft, session: Session, calls: Sequence[ToolCall], moved: Callable[[], None]
    ) -> list[ToolResult]:
        left = self._limits.seconds - draft.call_seconds
        if left <= 0:
            raise EpisodeTimeoutError
        began = time.monotonic()
        try:
            async with _beating(moved):
                return await session.call(calls, left)
        finally:
            draft.call_seconds += time.monotonic() - began


@asynccontextmanager
async def _beating(moved: Callable[[], None]) -> AsyncIterator[None]:
    """Call `moved` now and then in the body, which has limits of its own: nobody need take the rank for stuck."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            moved()

    beats: asyncio.Task[Any] = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        beats.cancel()
