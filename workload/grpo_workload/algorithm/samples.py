"""Prompts, completions and samples: the values that the parts of the trainer pass to each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
Text = str | list[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImages:
    """The images of a prompt, as engines take them and as the trained model does."""

    images: tuple[Any, ...]  # PIL images in RGB, in the order of their placeholders; only on the rank that samples
    engine_ids: tuple[int, ...]  # the prompt's tokens as engines take them: with one placeholder for each image
    token_id: int  # id of the tokens in whose place the model puts features of images
    inputs: Mapping[str, NDArray[Any]]  # the model's arguments: pixel_values and, in some families, image_grid_thw

    def for_engines(self) -> PromptImages:
        """Copy without the model's arguments, which take up to eight times the memory of the images."""
        return replace(self, inputs={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem: what the model reads, and the columns that rewards read."""

    index: int  # row in the dataset, the same in every attempt
    text: Text  # a string, or chat messages
    token_ids: tuple[int, ...]
    columns: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # seed of the completions sampled for it: see `seeds.prompt_seed`
    is_overlong: bool = False  # its row was too long: it was cut, or stands in for that row
    images: PromptImages | None = None  # None for a prompt of text alone
    ending: str = ""  # its last tokens as text, which completions continue: a chat template may begin the answer
    # What the chat template was given beside the messages, with the tools; None in jobs without tools or environments.
    rendering: Mapping[str, Any] | None = None


Spans = tuple[tuple[int, int], ...]
"""Parts of a sequence: first places, and those past the last."""


def length(spans: Iterable[tuple[int, int]]) -> int:
    """Return the number of tokens in parts of a sequence."""
    return sum(stop - start for start, stop in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A further sequence of an episode, which the one that it ended with does not go on from.

    Where it begins as another does, what was sampled there is context here: each token is one sequence's own.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # as a completion's
    logprobs: tuple[float, ...]
    context: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A completion of several turns besides its tokens: calls of tools, and the environment that it acted in."""

    messages: tuple[Message, ...] = ()  # its turns: assistant (with `tool_calls`), tool, assistant, ...
    context: Spans = ()  # parts of the completion that were not sampled, or are another sequence's own
    # Tokens of the prompt with what `reset` returned, or of a program's first request; None: the prompt's own.
    prompt_ids: tuple[int, ...] | None = None
    observation: str = ""  # what `reset` returned, put behind the prompt's last message
    asked: tuple[Message, ...] = ()  # a program's first request, in the place of its prompt
    forks: tuple[Fork, ...] = ()  # sequences besides the completion's own, on which the episode trains too
    num_turns: int = 1  # requests that the model answered
    num_calls: int = 0
    num_failed_calls: int = 0  # the policy's own failures: malformed or unknown calls, and those that raised
    call_seconds: float = field(default=0.0, compare=False)  # spent in calls, all together
    wait_seconds: float = field(default=0.0, compare=False)  # before an environment pod had a session for it
    retries: int = 0  # how often it began again because its environment failed
    reward: float | None = None  # what `get_reward` returned
    state: bytes | None = field(default=None, compare=False, repr=False)  # the environment: pickled, for users' rewards
    lost: str | None = None  # the cause why its environment failed until the last retry: it counts nowhere
    failure: str = ""  # what the environment failed with then, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer to a prompt."""

    token_ids: tuple[int, ...]  # with those of an episode's context, without those of its forks
    logprobs: tuple[float, ...]  # generator's log-probabilities at the sampling temperature; 0 for an episode's context
    text: str  # of an episode: of its last turn
    finish_reason: Literal["stop", "length"]
    weight_version: int  # version of the weights that sampled it: the oldest, if they were updated meanwhile
    weight_updates: int = 0  # number of updates of the weights while it was sampled
    # Experts that vLLM sent each token of prompt and completion to, but the last: [tokens - 1, layers, experts of a
    # token]; 0 in layers without experts. None without `training.routerReplay`.
    routed_experts: NDArray[np.integer[Any]] | None = field(default=None, compare=False, repr=False)
    episode: Episode | None = None  # None for a completion of one turn, without tools

    @property
    def num_own(self) -> int:
        """Number of tokens that the model sampled: all but those of an episode's context, in all its sequences."""
        if self.episode is None:
            return len(self.token_ids)
        return sum(len(one.token_ids) - length(one.context) for one in (*self.episode.forks, self._own_sequence))

    @property
    def filled(self) -> int:
        """Tokens that count towards `maxCompletionLength`: of the longest sequence, or sampled in all of them."""
        forks = self.episode.forks if self.episode else ()
        return max(len(self.token_ids), self.num_own, *(len(one.token_ids) for one in forks))

    @property
    def own_places(self) -> Sequence[int]:
        """Indexes of the tokens that the model sampled; those of forks are not among them."""
        context = self.episode.context if self.episode else ()
        bounds = [0, *(bound for span in context for bound in span), len(self.token_ids)]
        spans = [range(*span) for span in zip(bounds[::2], bounds[1::2], strict=True)]
        return spans[0] if len(spans) == 1 else [place for span in spans for place in span]

    @property
    def is_lost(self) -> bool:
        """Whether an environment failed, so that it counts nowhere."""
        return self.episode is not None and self.episode.lost is not None

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens that it continues: those of its prompt, unless an environment has put more into it."""
        own = self.episode.prompt_ids if self.episode else None
        return prompt.token_ids if own is None else own

    def num_read(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the number of tokens of each of its sequences: of the prompt, its own, and an episode's context."""
        forks = self.episode.forks if self.episode else ()
        whole = len(self.prompt_ids(prompt)) + len(self.token_ids)
        return whole, *(len(one.prompt_ids) + len(one.token_ids) for one in forks)

    def sequence(self, number: int) -> Completion:
        """Return one of its sequences, in the order of `num_read`, as a completion without forks."""
        if self.episode is None or not self.episode.forks:
            assert number == 0
            return self
        one = (self._own_sequence, *self.episode.forks)[number]
        prompt_ids = one.prompt_ids if number else self.episode.prompt_ids
        episode = replace(self.episode, context=one.context, prompt_ids=prompt_ids, forks=())
        return replace(self, token_ids=one.token_ids, logprobs=one.logprobs, episode=episode)

    @property
    def all_logprobs(self) -> Iterator[float]:
        """Those of all its sequences."""
        return chain(self.logprobs, *(one.logprobs for one in (self.episode.forks if self.episode else ())))

    @property
    def _own_sequence(self) -> Fork:
        assert self.episode is not None
        prompt_ids = self.episode.prompt_ids or ()
        return Fork(
            prompt_ids=prompt_ids, token_ids=self.token_ids, logprobs=self.logprobs, context=self.episode.context
        )

    def without_state(self) -> Completion:
        """Copy without the state of its environment, which only rewards read."""
        return self if self.episode is None else replace(self, episode=replace(self.episode, state=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion with what the loss needs to know about it."""

    prompt: Prompt
    completion: Completion
    reward: float  # NaN when every reward function returned None
    advantage: float
    extra: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # what rewards log of it, by reward
    # Own tokens of the completion of which this is one sequence of several; None: it is all of it.
    num_own: int | None = None

    def sequence(self, number: int) -> Sample:
        """Return one sequence of its completion as a sample: see `Completion.sequence`."""
        episode = self.completion.episode
        if episode is None or not episode.forks:
            return self
        return replace(self, completion=self.completion.sequence(number), num_own=self.completion.num_own)

    def bare(self) -> Sample:
        """Copy without what only rewards and engines read: smaller to send to another rank."""
        images = self.prompt.images and replace(self.prompt.images, images=())
        episode = self.completion.episode and replace(
            self.completion.episode, messages=(), observation="", asked=(), state=None
        )
        return replace(
            self,
            prompt=replace(self.prompt, text="", columns={}, images=images, ending="", rendering=None),
            completion=replace(self.completion, episode=episode),
            extra={},
        )
