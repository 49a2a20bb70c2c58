"""Prompts from a dataset: which ones at which step, as text and as token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_workload.config import DatasetConfig
from grpo_workload.types import Prompt


class PromptSource:
    """The prompts of a dataset in a shuffled order that depends on the seed and the step alone, so a resumed run sees the same ones."""

    scorer: Callable[[str, Prompt], float] | None  # reasoning-gym's own score of an answer, 0 to 1

    def __len__(self) -> int:
        """Number of prompts in the dataset."""
        raise NotImplementedError

    def batch(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """The prompts of optimizer step `step` (from 0), over all ranks; rows are read and tokenized here, not before."""
        raise NotImplementedError


def load_prompts(config: DatasetConfig, tokenizer: Any, *, seed: int) -> PromptSource:
    """Open the dataset. Raises ValueError (naming the field) when it cannot be found, read, or lacks a `prompt` column."""
    raise NotImplementedError
