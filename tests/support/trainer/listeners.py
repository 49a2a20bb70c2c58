"""A listener that remembers what a generator tells it."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_workload.algorithm.samples import Completion
from grpo_workload.generation.base import Silence


class Heard(Silence):
    """The completions of finished prompts by position, and how often a token may have been sampled."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Completion]] = {}
        self.moves = 0

    def moved(self) -> None:
        self.moves += 1

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        assert position not in self.groups
        self.groups[position] = list(completions)
