"""Finds the engine that holds up a push: all members of a transfer group wait for the slowest one, and none says why.

Workers count in the sender's store which pieces they have received. How long a push takes is known to nobody, so there
is no deadline for a whole one: only for the time without any progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from grpo_spec.contract import Engine
from grpo_workload.generation.roll_call import RollCall
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.http_client import EngineClient

T = TypeVar("T")


class PushProgress:
    """One push, as the sender sees it."""

    def __init__(
        self,
        roll: RollCall,
        seats: Sequence[tuple[EngineClient, range]],
        *,
        total: int,
        limit_of: Callable[[Engine], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a push.

        Args:
            roll: where the workers count.
            seats: engines and the ranks of their workers.
            total: number of pieces.
            limit_of: returns for how many seconds an engine may hold up the push.
            clock: time in seconds.
        """
        self._roll, self._seats, self._total, self._limit_of, self._clock = roll, seats, total, limit_of, clock
        self._before = [self._counted(ranks) for _, ranks in seats]
        self._open = {client.engine.name for client, _ in seats}  # engines whose answer is missing
        self._sent, self._awaits = 0, False
        self._seen: object = None
        self._since = clock()

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Mark the time in which this rank waits for engines to take a piece."""
        self._awaits = True
        yield
        self._sent += 1
        self._awaits = self._sent == self._total

    async def answer(self, client: EngineClient, call: Coroutine[Any, Any, None]) -> None:
        """Await the engine's answer, which ends its part."""
        await call
        self._open.discard(client.engine.name)

    async def unless_stalled(self, work: Coroutine[Any, Any, T], poll: float) -> T:
        """Await `work`; EngineError as soon as an engine holds up the push for too long."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=poll)
                if not task.done() and (error := self.look()) is not None:
                    raise error
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def look(self) -> EngineError | None:
        """Return the error of the engine that holds up the push for too long, if there is one.

        It is the one that has received least. Of several, an elastic one, since training can go on without it.
        """
        now = self._clock()
        counts = [self._counted(ranks) - before for (_, ranks), before in zip(self._seats, self._before, strict=True)]
        seen = counts, self._sent, len(self._open)
        late = [
            (count, client.engine)
            for count, (client, _) in zip(counts, self._seats, strict=True)
            if client.engine.name in self._open
        ]
        if seen != self._seen or not self._awaits or not late:
            self._seen, self._since = seen, now
            return None
        count, engine = min(late, key=lambda one: (one[0], not one[1].elastic))
        if now - self._since <= (limit := self._limit_of(engine)):
            return None
        return EngineError(
            engine,
            f"holds up a push of weights: it has received {count} of {self._total} pieces, and got no further for "
            f"{limit:g} s. Does it hang, or is its network cut? The end of its log may say",
        )

    def _counted(self, ranks: range) -> int:
        return min(self._roll.received(rank) for rank in ranks)
