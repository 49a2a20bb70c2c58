"""Starts a pod's ranks: for an attempt, or ahead of one that may begin in this pod (`restartStrategy: InPlace`).

A pod whose part of an attempt has failed holds until the operator's back-off is over. Meanwhile the next ranks load
torch and the like, which is a third of a recovery, and wait. They take no GPU before their attempt begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from grpo_spec.reports import ExitCode
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.rank_processes import Ranks
from grpo_workload.pod.run_once import AttemptRecord

logger = logging.getLogger(__name__)

MAY_BEGIN_AGAIN = (ExitCode.RANK_FAILED, ExitCode.PEER_LOST)
"""Ends of a pod after which another attempt may begin in it."""


class RankStarter:
    """Starts ranks of one attempt after another, of which ranks that wait for the next one outlive the hold."""

    def __init__(self, command: Sequence[str], delay: float) -> None:
        """`command`: what a rank runs; `delay`: seconds for which a pod holds before ranks are started ahead."""
        self._command, self._delay = command, delay
        self._waiting: Ranks | None = None

    @asynccontextmanager
    async def ahead(self, place: Place) -> AsyncIterator[None]:
        """While the context is open, start ranks ahead if this pod's part of the attempt has failed before."""
        ended = AttemptRecord(place).outcome
        may_begin_again = ended is not None and ended.exit_code in MAY_BEGIN_AGAIN
        task = asyncio.create_task(self._start_ahead(place)) if may_begin_again else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _start_ahead(self, place: Place) -> None:
        await asyncio.sleep(self._delay)
        try:
            self._waiting = Ranks.start(place, self._command, ahead=True)
        except Exception:  # such as a limit on processes or threads: the attempt fails of it, if it is still there
            logger.warning("ranks load their programs once the next attempt has begun", exc_info=True)

    async def start(self, place: Place) -> Ranks:
        """Return the ranks of an attempt, which have begun. Raises OSError if one cannot be started."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if waiting.begin(place):
                logger.info("the ranks have loaded their programs ahead, or still do")
                return waiting
            await waiting.stop(grace=0)
        return Ranks.start(place, self._command)

    async def close(self) -> None:
        """Stop ranks that wait."""
        if self._waiting is not None:
            await self._waiting.stop(grace=0)
