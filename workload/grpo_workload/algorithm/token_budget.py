"""The tokens that a micro-batch may hold, from the memory that passes over fewer tokens took. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MOST = 65_536
"""Largest micro-batch that is chosen: a GPU waits for launches no more, and kernels index with 32 bits. It is no limit
of a sequence: a longer one is a micro-batch of its own."""
FIRST = 1024  # tokens of the first pass
GROWTH = 4
STEP = 1.25
"""A further pass has at least so many times the tokens of the last: closer ones would tell rounding apart."""
NUM_PASSES = 4
"""Passes from FIRST to MOST, by GROWTH."""


class Pass(NamedTuple):
    """A forward and backward pass that was measured."""

    tokens: int
    memory: int  # bytes that it took at its peak


def next_pass(passes: Sequence[Pass], room: int, most: int) -> int:
    """Return how many tokens the next pass may have without running out of memory; 0: no pass is needed.

    In proportion to the last pass. The peak is the largest of several, each a constant (such as a layer's gradients)
    and a part that grows with the tokens, so a larger pass takes less than in proportion.

    Args:
        passes: those before, from the smallest to the largest.
        room: bytes that a pass may take.
        most: no pass has more tokens.
    """
    if not passes:
        return min(FIRST, most)
    last = passes[-1]
    tokens = min(GROWTH * last.tokens, room * last.tokens // max(1, last.memory), most)
    return tokens if tokens >= STEP * last.tokens or (tokens == most > last.tokens) else 0


def largest(passes: Sequence[Pass], room: int) -> int:
    """Return the largest number of tokens, at least 1, whose pass fits into `room` bytes.

    By the line through the last two passes, up to twice the tokens of the last.
    """
    last = passes[-1]
    return max(1, min(2 * last.tokens, last.tokens + math.floor((room - last.memory) / _slope(passes))))


def expected(passes: Sequence[Pass], tokens: int) -> int:
    """Return the bytes that a pass over `tokens` takes by the line through the last two passes; 0 without a pass."""
    return math.ceil(passes[-1].memory + _slope(passes) * (tokens - passes[-1].tokens)) if passes else 0


def _slope(passes: Sequence[Pass]) -> float:
    """Return the bytes of a further token."""
    last = passes[-1]
    if len(passes) > 1 and passes[-2].memory < last.memory:
        return (last.memory - passes[-2].memory) / (last.tokens - passes[-2].tokens)
    return max(1, last.memory) / last.tokens
