"""Plays the episodes of programs: what `generation.episodes` does with tools, where the program has the loop."""

from __future__ import annotations

from collections.abc import Callable

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.environments.base import Program
from grpo_workload.generation.gateway.conversation import Conversation, Words
from grpo_workload.generation.gateway.program_episode import ProgramEpisode, Sample
from grpo_workload.generation.gateway.server import GatewayServer


class Programs:
    """Player of the programs of one rank."""

    def __init__(
        self, words: Words, server: GatewayServer, *, max_tokens: int, max_prompt_tokens: int | None, seconds: float
    ) -> None:
        """Take what all episodes share.

        Args:
            words: messages as tokens.
            server: what programs ask.
            max_tokens: of a completion, sampled or read.
            max_prompt_tokens: of an episode's first request; None: no limit is known.
            seconds: how long a program may take in an episode, without the model.
        """
        self._words, self._server = words, server
        self._max_tokens, self._max_prompt_tokens, self._seconds = max_tokens, max_prompt_tokens, seconds

    async def play(
        self, program: Program, prompt: Prompt, number: int, sample: Sample, moved: Callable[[], None], retries: int
    ) -> Completion:
        """Play an episode once.

        Args:
            program: the program, with the row of the prompt.
            prompt: its prompt; what the model reads is the program's first request.
            number: of the episode among those of its prompt.
            sample: asks the engine.
            moved: is called now and then while the program takes its time.
            retries: how often the episode has begun before.

        Raises:
            EnvironmentLostError: see `ProgramEpisode.play`.
            Exception: as `sample` does.
        """
        conversation = Conversation(self._words, self._max_tokens, self._max_prompt_tokens)
        episode = ProgramEpisode(conversation, sample, self._seconds, seed=prompt.seed, number=number)
        async with self._server.serve(episode) as endpoint:
            reward = await episode.play(program, endpoint, moved)
            return conversation.complete(reward, episode.spent_seconds, is_over=episode.is_over, retries=retries)
