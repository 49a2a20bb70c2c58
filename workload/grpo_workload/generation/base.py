"""What the training loop needs of whoever samples completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from grpo_workload.packing import TensorSpec
from grpo_workload.types import Completion, Prompt


class Weights(Protocol):
    """Names and tensors in the checkpoint's terms, and what they will be; taking them may be collective."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Of all of them, in order."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Generator(Protocol):
    """Samples completions with the policy's weights. Every rank has one, and calls the same methods in the same order."""

    def generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        """`num_generations` completions of each of this rank's prompts, in the order of the prompts; a rank may have none.

        A prompt's completions depend on its seed and the weights, up to rounding: not on the prompts beside it, nor on the ranks.
        """
        ...

    def sleep(self) -> None:
        """Give memory back until weights come; between `generate` and `sync_weights`."""
        ...

    def expect_weights(self) -> None:
        """All ranks have their completions, and `sync_weights` comes next: begin what it would wait for."""
        ...

    def sync_weights(self, weights: Weights, version: int) -> None:
        """Take over all of `weights`, in the checkpoint's names; completions carry `version` from here on."""
        ...

    def blame(self, error: Exception) -> Exception:
        """What is to blame for an error of the loop: an engine that failed, else the error itself."""
        ...

    def close(self) -> None:
        """End it; collective. The process group is unusable afterwards: no collective may follow."""
        ...
