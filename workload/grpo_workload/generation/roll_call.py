"""The meeting of engines' workers and the sender of weights before they join a transfer group.

A group forms only if all of its members join, and NCCL sets no deadline: a worker that waits in it for a missing one
can join no other group either. So each worker first says in the sender's store that it is here, and joins once the
sender says that all of them are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CALLED_OFF = "called off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The facts that an engine needs to join a transfer group."""

    host: str  # of the sender
    port: int  # of the sender's store
    meeting: str  # name of the group: members of different ones never meet
    rank_offset: int  # rank of the engine's first worker in the group
    world_size: int  # number of ranks in the group, the sender included
    patience: float  # seconds that the group may take to form


def open_store(host: str, port: int, *, timeout_seconds: float, listens: bool = False) -> Any:
    """Open the store where members meet. The one that `listens` serves it for all groups: it never needs a new port.

    A connection does one thing at a time, so each group gets its own.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store_class: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store_class(host, port, is_master=listens, timeout=timeout, wait_for_workers=False)


class Seat:
    """A worker's side of one meeting."""

    def __init__(self, store: Any, meeting: str, rank: int) -> None:
        self._place, self._meeting, self._rank = _place(store, meeting), meeting, rank

    def check_in(self) -> str:
        """Say that the worker is here, and wait for the others; return the sender's word, with which it may join.

        RuntimeError when the group is called off, the sender has gone, or the store's timeout is over.
        """
        self._place.set(f"here/{self._rank}", "")
        word = str(self._place.get("word"), "ascii")
        if word == _CALLED_OFF:
            raise RuntimeError(
                f"transfer group {self._meeting} was called off: not all of its members came, or one failed"
            )
        return word

    def count_piece(self) -> None:
        """Count a piece that the worker has received, so that the sender sees who is late."""
        self._place.add(f"received/{self._rank}", 1)


class RollCall:
    """The sender's side of one meeting. Its methods answer at once, in any thread."""

    def __init__(self, store: Any, meeting: str) -> None:
        self._place = _place(store, meeting)
        self.is_over = False
        """Whether nobody waits for the group any more: it is there, or given up."""

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks have not come yet."""
        return [rank for rank in ranks if not self._place.check([f"here/{rank}"])]

    def received(self, rank: int) -> int:
        """Return how many pieces the worker has counted."""
        return int(self._place.add(f"received/{rank}", 0))

    def let_join(self, word: str) -> bool:
        """Let all workers join, with this word; False if the group was called off before."""
        return bool(self._place.compare_set("word", "", word) != _CALLED_OFF.encode())

    def call_off(self) -> None:
        """Let the workers that have come go, unless they were let join."""
        self.is_over = True
        self._place.compare_set("word", "", _CALLED_OFF)


def _place(store: Any, meeting: str) -> Any:
    return dist.PrefixStore(f"meetings/{meeting}", store)  # type: ignore[attr-defined]
