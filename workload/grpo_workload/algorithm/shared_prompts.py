"""The layout of sequences that share a prompt: the model is fed its tokens once, before the first completion.

Shapes: B sequences, N tokens that the model is fed, M tokens of all sequences, each with its whole prompt; K
completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """The keys that the queries of each sequence see: all of its own tokens, with those of the shared prompt.

    The queries of a sequence are the last of its tokens: all but those that another sequence is fed.
    """

    places_M: Tensor  # place in N of each token of the sequences
    bounds: Tensor  # int32 [B + 1]: the offset in M at which each sequence begins, and M
    longest: int  # tokens of the longest sequence, with its prompt
    own_N: Tensor  # place in M of each token that the model is fed, in the sequence that is fed it
    places_K: Tensor  # `MicroBatch.places_K`, in M

    def to(self, device: torch.device | str) -> SharedKeys:
        """Return them on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return SharedKeys(**values | {name: one.to(device, non_blocking=True) for name, one in tensors.items()})


class Layout:
    """Places of sequences' tokens among those that the model is fed."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int] = ()) -> None:
        """Lay out sequences.

        Args:
            lengths: tokens of each sequence.
            shared: number of first tokens of each that are those of the last sequence before it with 0 here. The model
                is fed them there. Empty: none shares any.
        """
        self.lengths, self.shared = lengths, shared or (0,) * len(lengths)
        own = [length - skipped for length, skipped in zip(lengths, self.shared, strict=True)]
        self.starts = list(accumulate(own, initial=0))  # places at which what is fed of each begins, and N
        self.longest = max(own)  # tokens that the model is fed of one sequence
        self._firsts: list[int] = []  # place of the first token of each sequence
        for start, skipped in zip(self.starts, self.shared, strict=False):
            self._firsts.append(self._firsts[-1] if skipped else start)

    def places(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the places of some tokens of each sequence, by their numbers in it."""
        every = zip(tokens, self._firsts, self.starts, self.shared, strict=False)
        return torch.cat(
            [
                one + start if not skipped else torch.where(one < skipped, one + first, one + (start - skipped))
                for one, first, start, skipped in every
            ]
        )

    def keys(self, tokens: Sequence[Tensor]) -> SharedKeys | None:
        """Return the keys of the sequences; None if none shares any.

        Args:
            tokens: those of each sequence whose places are `MicroBatch.places_K`.
        """
        if not any(self.shared):
            return None
        bounds = list(accumulate(self.lengths, initial=0))
        fed = zip(self._firsts, self.starts, self.lengths, self.shared, strict=False)
        parts = [
            part
            for first, start, length, skipped in fed
            for part in (torch.arange(first, first + skipped), torch.arange(start, start + length - skipped))
        ]
        own = [
            torch.arange(begin + skipped, end)
            for begin, end, skipped in zip(bounds, bounds[1:], self.shared, strict=False)
        ]
        return SharedKeys(
            places_M=torch.cat(parts),
            bounds=torch.tensor(bounds, dtype=torch.int32),
            longest=max(self.lengths),
            own_N=torch.cat(own),
            places_K=torch.cat([one + begin for one, begin in zip(tokens, bounds, strict=False)]),
        )
