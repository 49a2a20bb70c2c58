"""Completions that are sampled over several steps, while the weights change: what each has so far, and what is left.

Pure. Ranks that share an engine keep equal records, so they ask it for the same requests and stop at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from grpo_workload.algorithm.samples import Completion
from grpo_workload.ranks.seeds import sample_seed

PromptKey = tuple[int, int, int, tuple[int, ...]]
"""A prompt: the place of its rank among those that share the engine, its index, its seed and its tokens."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the engine: one completion, from its beginning or from where it was cut."""

    name: str
    token_ids: list[int]  # those of the prompt, and those sampled so far
    seed: int
    max_tokens: int


@dataclass(slots=True)
class Draft:
    """A completion as far as it has been sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled its tokens, ascending
    finish_reason: FinishReason | None = None

    def complete(self, text: str) -> Completion:
        """Return the completion; it must be finished."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=text,
            finish_reason=self.finish_reason,
            weight_version=self.versions[0],
            weight_updates=self.versions[-1] - self.versions[0],
        )


class Begun:
    """Drafts of all prompts that have begun and were not dropped yet."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the largest number of tokens in a completion."""
        self._max_tokens = max_tokens
        self._drafts: dict[PromptKey, list[Draft]] = {}
        self._asked: dict[str, tuple[PromptKey, Draft]] = {}  # by the names of requests that the engine works on
        self._num_requests = 0

    def begin(self, prompts: Iterable[PromptKey], num_generations: int) -> None:
        """Add those of `prompts` that have not begun, with `num_generations` drafts each."""
        for prompt in prompts:
            drafts = self._drafts.setdefault(prompt, [Draft() for _ in range(num_generations)])
            assert len(drafts) == num_generations, (len(drafts), num_generations)

    def drafts(self, prompt: PromptKey) -> list[Draft]:
        """Return the drafts of a prompt that has begun."""
        return self._drafts[prompt]

    def unfinished(self, prompts: Iterable[PromptKey]) -> set[PromptKey]:
        """Return those of `prompts` that have an unfinished draft."""
        return {prompt for prompt in prompts if not _is_finished(self._drafts[prompt])}

    def ask(self, first: Iterable[PromptKey]) -> list[Request]:
        """Return a request for each unfinished draft: those of the prompts `first`, then the others as they began."""
        assert not self._asked, "the requests of the last time were not cut"
        requests = []
        for prompt in dict.fromkeys((*first, *self._drafts)):
            for number, draft in enumerate(self._drafts[prompt]):
                if draft.finish_reason is not None:
                    continue
                name = f"begun-{self._num_requests}"
                self._num_requests += 1
                self._asked[name] = prompt, draft
                _, _, seed, token_ids = prompt
                num_tokens = len(draft.token_ids)
                requests.append(
                    Request(
                        name=name,
                        token_ids=[*token_ids, *draft.token_ids],
                        seed=sample_seed(seed, number, num_tokens),
                        max_tokens=self._max_tokens - num_tokens,
                    )
                )
        return requests

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        finish_reason: FinishReason | None,
    ) -> PromptKey | None:
        """Add what weights of `version` sampled for a request; return its prompt if this finishes the last draft."""
        prompt, draft = self._asked[name]
        assert len(token_ids) == len(logprobs), (len(token_ids), len(logprobs))
        draft.token_ids += token_ids
        draft.logprobs += logprobs
        if token_ids and version not in draft.versions[-1:]:
            draft.versions.append(version)
        draft.finish_reason = finish_reason
        if finish_reason is None:
            return None
        del self._asked[name]
        return prompt if _is_finished(self._drafts[prompt]) else None

    def cut(self) -> list[str]:
        """Return the names of the unfinished requests, which the engine must drop; the next `ask` continues them."""
        names = list(self._asked)
        self._asked = {}
        return names

    def drop(self, prompts: Collection[PromptKey]) -> None:
        """Forget prompts whose completions were handed out."""
        for prompt in set(prompts):
            del self._drafts[prompt]


def _is_finished(drafts: Iterable[Draft]) -> bool:
    return all(draft.finish_reason is not None for draft in drafts)
