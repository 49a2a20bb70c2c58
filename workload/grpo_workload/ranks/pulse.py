"""Ranks wait for each other where some work much longer: as long as those that are late make progress.

A collective gives up after a fixed time. How long a rank samples completions and scores them is known to nobody, so
before the first collective after that all ranks `meet` here, on the store of their process group. A late rank says now
and then that it makes progress (`beat`): a token was sampled, an answer was scored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

BEATS = 20
"""Number of beats within the time after which a silent rank counts as stuck, at most."""


def open_store(timeout_seconds: float) -> Any:
    """Return a connection of its own to the store of all ranks: while one call waits, others on it would wait, too."""
    store_class: Any = dist.TCPStore  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_seconds)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return store_class(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Pulse:
    """One rank's part."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        limit_seconds: float,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Join.

        Args:
            store: where all ranks meet; each has a connection of its own.
            rank: this rank.
            world_size: number of ranks.
            limit_seconds: a late rank may be silent for so long.
            on_beat: called with each beat, in the same thread.
        """
        self._store, self._rank, self._world_size = store, rank, world_size
        self._limit, self._interval = limit_seconds, limit_seconds / BEATS
        self._on_beat = on_beat
        self._meeting = self._count = 0
        self._is_waiting = False  # a beat would wait, too: the connection does one thing at a time
        self._due = time.monotonic()
        self._write()

    def beat(self) -> None:
        """Say that this rank makes progress. Call it in any thread, however often; it acts now and then."""
        if self._is_waiting or (now := time.monotonic()) < self._due:
            return
        self._due = now + self._interval
        self._count += 1
        self._write()
        self._on_beat()

    def meet(self) -> None:
        """Wait until all ranks have called this as often.

        Raises:
            RuntimeError: a late rank has not called `beat` for too long; the message names it.
        """
        self._meeting += 1
        self._write()
        arrived, complete = f"pulse/{self._meeting}/arrived", f"pulse/{self._meeting}/complete"
        if self._store.add(arrived, 1) == self._world_size:
            self._store.set(complete, "")
            for name in ("arrived", "complete"):  # of the meeting before, which all have left
                self._store.delete_key(f"pulse/{self._meeting - 1}/{name}")
            return
        self._is_waiting = True
        self._wait(complete)
        self._is_waiting = False

    def _wait(self, key: str) -> None:
        heard: dict[int, tuple[str, float]] = {}  # by rank: what it said last, and when that was new
        while True:
            try:
                self._store.wait([key], timedelta(seconds=self._interval))
            except dist.DistStoreError:
                self._check_late(heard)
            else:
                return

    def _check_late(self, heard: dict[int, tuple[str, float]]) -> None:
        now = time.monotonic()
        values = self._store.multi_get([f"pulse/{rank}" for rank in range(self._world_size)])
        for rank, value in enumerate(value.decode() for value in values):
            if rank not in heard or heard[rank][0] != value:
                heard[rank] = value, now
            is_late = int(value.partition(" ")[0]) < self._meeting
            if is_late and now - heard[rank][1] > self._limit:
                raise RuntimeError(
                    f"rank {rank} has sampled no token and scored no answer for {self._limit:g} s "
                    "(rendezvous.timeoutSeconds) while the other ranks wait for it: look at the end of its log"
                )

    def _write(self) -> None:
        self._store.set(f"pulse/{self._rank}", f"{self._meeting} {self._count}")
