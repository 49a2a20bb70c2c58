"""The interface between the training loop and the generators that sample its completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from grpo_spec.contract import Engine
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.weights.wire import TensorSpec


class Weights(Protocol):
    """The policy's weights under the checkpoint's names. Iterating yields names and tensors, and may be collective."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Names, types and shapes of all weights, in the order of iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Listener(Protocol):
    """The listener to a generator that samples."""

    def moved(self) -> None:
        """A token may have been sampled; called from any thread, however often."""
        ...

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        """All completions of the prompt at `position` are there; called from any thread, once for a prompt at most."""
        ...

    def meet(self) -> None:
        """Wait for all ranks; see `Pulse.meet`. Called before a collective for which ranks sample unequally long."""
        ...


class Silence:
    """A listener that nobody needs."""

    def moved(self) -> None:
        """See `Listener.moved`."""

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        """See `Listener.finished`."""

    def meet(self) -> None:
        """See `Listener.meet`."""


SILENCE = Silence()


class Generator(Protocol):
    """Samples completions with the policy's weights. Every rank has one; all call its methods in the same order."""

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """Return `num_generations` completions for each of this rank's prompts, in order; it may have none.

        It takes as long as it takes: an engine that samples no token for too long raises an error.

        A prompt's completions depend, up to rounding, only on its seed and the weights: not on the other prompts or
        ranks.
        """
        ...

    def begin(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE) -> None:
        """Begin to sample prompts that `generate` is asked for in a later step, after updates of the weights.

        Sampling goes on through the updates where it can (`training.maxStaleness`). `finished` of this listener gets
        positions in these prompts.
        """
        ...

    def evaluate(
        self, prompts: Sequence[Prompt], num_generations: int, temperature: float, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """Return completions as `generate`, sampled at this temperature; 0 takes the likeliest tokens.

        Called after `sync_weights`. It changes nothing that `generate` returns, also of prompts that have begun.
        """
        ...

    def sleep(self) -> None:
        """Free memory until new weights arrive; called between `generate` and `sync_weights`."""
        ...

    def expect_weights(self) -> None:
        """Prepare for `sync_weights`, which is called next; all ranks already have their completions."""
        ...

    def sync_weights(self, weights: Weights, version: int) -> None:
        """Take over all of `weights`; completions carry `version` from then on."""
        ...

    def logprobs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Return log-probabilities of all tokens but the first at temperature 1, from each engine that this rank feeds.

        Keys are the engines' names, for people. Empty where no engine holds weights of its own, or one is away.
        """
        ...

    def idle_seconds(self) -> float | None:
        """Return how long, since the last call, engines had no request of this rank; None if they share its device."""
        ...

    def engines(self) -> Sequence[Engine]:
        """Return the servers that hold the current weights; none if ranks sample themselves."""
        ...

    def left_out(self) -> Sequence[str]:
        """Return why engines that are healthy get neither weights nor prompts, for people."""
        ...

    def blame(self, error: Exception) -> Exception:
        """Return the cause of an error of the loop: the failure of an engine, or else the error itself."""
        ...

    def close(self) -> None:
        """Shut down; collective. It may destroy the process group, so no collective may follow."""
        ...
