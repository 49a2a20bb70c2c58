"""The sequences that a step trains on, and which of them share the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

SAVING = 1.2
"""Sequences share a prompt where all their tokens are at least so many times those that the model is then fed."""
COPY = 1 / 8
"""Memory of a shared token's copy as a part of that of a token that the model is fed: attention copies its key and
value for each sequence. An eighth with multi-head attention, whose keys are as large as hidden states; less with fewer
key heads. With activations in host memory a token takes less, and `policy/model/sharing.py` keeps wide keys apart.
"""


class Piece(NamedTuple):
    """Reference to a sequence of a sample, and its length."""

    owner: int  # rank that sampled it
    place: int  # index among that rank's samples
    tokens: int  # number of tokens of its sequence
    sequence: int = 0  # index among those of its completion
    shared: int = 0  # its first tokens that are those of the last piece before it in the micro-batch with 0 here

    @property
    def fed(self) -> int:
        """Number of its tokens that the model is fed for it."""
        return self.tokens - self.shared


class Unit(NamedTuple):
    """Pieces of one micro-batch: some that share a prompt, which the first has, or a single one."""

    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens that the model is fed."""
        return sum(piece.fed for piece in self.pieces)

    @property
    def size(self) -> int:
        """Number of tokens of a micro-batch of single sequences that takes about as much memory."""
        return self.tokens + int(COPY * sum(piece.shared for piece in self.pieces))

    def halves(self) -> tuple[Unit, Unit]:
        """Split at least two pieces into two units, each with the prompt."""
        first, *rest = self.pieces[len(self.pieces) // 2 :]
        return Unit(self.pieces[: len(self.pieces) // 2]), Unit((first._replace(shared=0), *rest))


def units(
    pieces: Iterable[tuple[Piece, tuple[Hashable, int] | None]], *, max_tokens: int, max_sequences: int
) -> list[Unit]:
    """Join pieces that share a prompt to units of at most `max_tokens` and `max_sequences`, where that saves `SAVING`.

    Args:
        pieces: each with its prompt, and the number of the prompt's tokens; None: it stays alone.
        max_tokens: the largest size of a unit of several pieces.
        max_sequences: the most pieces of a unit.
    """
    groups: dict[Hashable, tuple[int, list[Piece]]] = {}
    for piece, prompt in pieces:
        tokens = 0 if prompt is None else prompt[1]
        groups.setdefault(prompt or piece, (tokens, []))[1].append(piece)
    return [unit for tokens, own in groups.values() for unit in _joined(own, tokens, max_tokens, max_sequences)]


def _joined(pieces: list[Piece], shared: int, max_tokens: int, max_sequences: int) -> list[Unit]:
    joined: list[Unit] = []
    for piece in pieces:
        if joined and len(joined[-1].pieces) < max_sequences:
            longer = Unit((*joined[-1].pieces, piece._replace(shared=shared)))
            if longer.size <= max_tokens:
                joined[-1] = longer
                continue
        joined.append(Unit((piece,)))
    return [one for unit in joined for one in ([unit] if _saves(unit) else _single(unit))]


def _saves(unit: Unit) -> bool:
    return sum(piece.tokens for piece in unit.pieces) >= SAVING * unit.tokens


def _single(unit: Unit) -> list[Unit]:
    return [Unit((piece._replace(shared=0),)) for piece in unit.pieces]
