"""The prompts of an open dataset: which ones each step trains on, as text and as token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.overlong import PromptLimit
from grpo_workload.data.prompt_maker import Preprocess, PreprocessError, what_was_raised
from grpo_workload.ranks.seeds import prompt_seed

_SUBSTITUTES = 1000  # number of rows that are tried in place of one that is too long

Scorer = Callable[[str, Prompt], float]
"""reasoning-gym's score of an answer to a prompt."""


class Rows(Protocol):
    """A dataset: rows by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """The row to use for one position of a step."""

    index: int  # index of the row
    seed: int  # seed of the prompt: see `seeds.prompt_seed`


class PromptSource:
    """The prompts of a dataset, in an order that depends only on the seed and the step.

    A resumed run therefore sees the same prompts. If rows are shuffled, every epoch (pass through the dataset) has its
    own order; a step that reaches past the end of one continues in the next, so no prompt is skipped. It pickles if its
    parts do.
    """

    def __init__(
        self,
        rows: Rows,
        to_prompt: Callable[[int, Mapping[str, Any]], Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        preprocess: Preprocess | None = None,
        scorer: Scorer | None = None,
        limit: PromptLimit | None = None,
    ) -> None:
        """Make prompts of `rows` by `preprocess`, if given, and then `to_prompt(index, row)`."""
        self.rows = rows
        self._to_prompt = to_prompt
        self._seed, self._shuffle = seed, shuffle
        self._preprocess = preprocess
        self.scorer, self.limit = scorer, limit
        self.has_images = False  # whether the first prompt has images
        self.first_step = 0  # the step that begins with the first row of the order

    @property
    def is_scannable(self) -> bool:
        """Whether reading all rows shows their prompts, and is cheap: rows are neither generated nor changed.

        The user's function may be slow, and differ at each step. Images take long to decode.
        """
        return self.limit is not None and self._preprocess is None and self.scorer is None and not self.has_images

    def __len__(self) -> int:
        """Number of prompts in the dataset."""
        return len(self.rows)

    def draw(self, step: int, slot: int, prompts_per_step: int) -> Draw:
        """Return the row of a prompt of optimizer step `step` (counted from 0).

        Args:
            step: number of the step.
            slot: the prompt's position among all ranks' prompts of the step; or more, for further prompts: each
                `prompts_per_step` of them are different rows, drawn from the whole dataset.
            prompts_per_step: number of prompts in a step.
        """
        seed = prompt_seed(self._seed, step, slot)
        if (round_number := slot // prompts_per_step) > 0:
            rows = _further(len(self), (self._seed, step, round_number), prompts_per_step)
            return Draw(int(rows[slot % prompts_per_step % len(rows)]), seed)
        taken = max(0, step - self.first_step)  # rewards are tried with a prompt of step 0 wherever the run begins
        epoch, offset = divmod(taken * prompts_per_step + slot, len(self))
        index = int(_order(len(self), self._seed, epoch)[offset]) if self._shuffle else offset
        return Draw(index, seed)

    def prepare(self, draw: Draw) -> Prompt:
        """Return the prompt of a draw, whose length fits.

        In place of a row that is skipped, it is of rows drawn with the seed of the draw: the same ones in every process
        and attempt, whatever was skipped before.

        Raises:
            PromptError: the row cannot be used, or is too long.
            PreprocessError: a retry may help.
        """
        prompt, limit = self.make(draw), self.limit
        if limit is None or limit.fits(prompt):
            return prompt
        if limit.action == "truncate" and prompt.images is None:  # a part of an image has no meaning
            return limit.truncated(prompt)
        if limit.action == "skip":
            for index in np.random.default_rng(draw.seed).integers(len(self), size=_SUBSTITUTES):
                other = self.make(Draw(int(index), draw.seed))
                if limit.fits(other):
                    return dataclasses.replace(other, is_overlong=True)
        raise limit.error(prompt)

    def make(self, draw: Draw) -> Prompt:
        """Read the row and make its prompt, however long it is. Raises as `prepare` does."""
        try:
            row = self.rows[draw.index]
        except Exception as error:  # storage and decoders may raise anything
            raise PreprocessError(f"dataset: reading row {draw.index} {what_was_raised(error)}") from error
        if self._preprocess is not None:
            row = self._preprocess(draw.index, row, draw.seed)
        return dataclasses.replace(self._to_prompt(draw.index, row), seed=draw.seed)

    def batch(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """Prepare all prompts of a step in this process."""
        return [self.prepare(self.draw(step, position, prompts_per_step)) for position in range(prompts_per_step)]


@lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


@lru_cache(maxsize=2)
def _further(num_rows: int, seed: tuple[int, ...], count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).choice(num_rows, min(count, num_rows), replace=False)
