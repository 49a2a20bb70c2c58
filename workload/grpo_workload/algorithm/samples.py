"""Prompts, completions and samples: the values that the parts of the trainer pass to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Message = dict[str, str]
Text = str | list[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem: what the model reads, and the columns that rewards read."""

    index: int  # row in the dataset, the same in every attempt
    text: Text  # a string, or chat messages
    token_ids: tuple[int, ...]
    columns: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # seed of the completions sampled for it: see `seeds.prompt_seed`
    is_overlong: bool = False  # its row was too long: it was cut, or stands in for that row


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer to a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # generator's log-probabilities of the sampled tokens, at the sampling temperature
    text: str
    finish_reason: Literal["stop", "length"]
    weight_version: int  # version of the weights that sampled it: the oldest, if they were updated meanwhile
    weight_updates: int = 0  # number of updates of the weights while it was sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion with what the loss needs to know about it."""

    prompt: Prompt
    completion: Completion
    reward: float  # NaN when every reward function returned None
    advantage: float
    extra: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # what rewards log of it, by reward

    def bare(self) -> Sample:
        """Copy without the text and columns, which only rewards read: small enough to send to another rank."""
        return replace(self, prompt=replace(self.prompt, text="", columns={}), extra={})
