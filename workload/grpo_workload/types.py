"""The values that travel between the parts of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Message = dict[str, str]
Text = str | list[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem: what the model reads, and the columns that rewards read."""

    index: int  # position in the dataset, stable over epochs and restarts
    text: Text  # a string, or chat messages
    token_ids: tuple[int, ...]
    columns: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the completions sampled for it: see `seeds.prompt_seed`


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer to a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampled tokens, at the sampling temperature, as the generator saw them
    text: str
    finish_reason: Literal["stop", "length"]
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion with everything the loss needs to know about it."""

    prompt: Prompt
    completion: Completion
    reward: float  # NaN when every reward function returned None
    advantage: float

    def bare(self) -> Sample:
        """The same without what rewards alone read: to be sent to another rank."""
        return replace(self, prompt=replace(self.prompt, text="", columns={}))
