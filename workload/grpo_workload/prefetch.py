"""The prompts of a rank, prepared ahead of their step by worker processes: a slow row makes no step wait.

What a prompt becomes depends on its row, its step and its place there alone: neither on how many workers there are nor on which took it.
Workers are spawned, since a copy of a rank by fork may not touch its GPU, and run at a lower priority than the rank. Light at import, which
each of them does.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from grpo_workload.tasks import Draw, PromptSource
    from grpo_workload.types import Prompt

NICENESS = 10


class PromptLoader:
    """The prompts at the places `share` of each of `steps`, to be taken in order."""

    def __init__(
        self,
        source: PromptSource,
        *,
        share: Sequence[int],
        prompts_per_step: int,
        steps: range,
        num_workers: int,
        prefetch_steps: int,
        timeout_seconds: float,
        folder: Path,
    ) -> None:
        """Start `num_workers`, which then load what they need; without any, prompts are prepared when they are taken.

        Args:
            source: what to prepare; with workers it must pickle, and is written to `folder` for them.
            share: this rank's places in a step.
            prompts_per_step: prompts of a step over all ranks.
            steps: the steps that the loop will take.
            num_workers: processes.
            prefetch_steps: how many steps they are ahead.
            timeout_seconds: how long other ranks wait for this one; a prompt that takes nearly as long is given up on.
            folder: for a file of this rank's own.
        """
        self._source, self._share, self._prompts_per_step, self._steps = source, share, prompts_per_step, steps
        self._prefetch_steps, self._patience = prefetch_steps, 0.9 * timeout_seconds
        self._pending: dict[int, list[tuple[Draw, Future[bytes]]]] = {}
        self._workers = _Workers(num_workers, source, folder) if num_workers else None

    def take(self, step: int) -> list[Prompt]:
        """Prompts of this rank at `step`.

        Raises:
            PromptError: a prompt cannot be used; names its row.
            PreprocessError: a prompt could not be prepared this time; names its row.
        """
        if self._workers is None:
            return [self._source.prepare(draw) for draw in self._draws(step)]
        for ahead in range(step, min(step + self._prefetch_steps + 1, self._steps.stop)):
            if ahead not in self._pending:
                self._pending[ahead] = [(draw, self._workers.prepare(draw)) for draw in self._draws(ahead)]
        return [self._result(draw, future) for draw, future in self._pending.pop(step)]

    def close(self) -> None:
        """End the workers, whatever they are at."""
        if self._workers is not None:
            self._workers.close()

    def _draws(self, step: int) -> list[Draw]:
        return [self._source.draw(step, position, self._prompts_per_step) for position in self._share]

    def _result(self, draw: Draw, future: Future[bytes]) -> Prompt:
        from grpo_workload.prompt_making import PreprocessError

        try:
            return cast("Prompt", pickle.loads(future.result(self._patience)))
        except BrokenProcessPool as error:
            raise PreprocessError(
                f"dataset: a worker process died before row {draw.index} was prepared; if it was killed for its memory, lower "
                "dataset.dataloaderNumWorkers or raise resources.limits.memory"
            ) from error
        except TimeoutError as error:
            raise PreprocessError(
                f"dataset: row {draw.index} was not prepared within {math.floor(self._patience)} s; if dataset.preprocess is slow and not "
                "stuck, raise dataset.dataloaderNumWorkers, dataset.prefetchSteps, or rendezvous.timeoutSeconds"
            ) from error


class _Workers:
    """Processes that live no longer than the pipe to this one."""

    def __init__(self, count: int, source: PromptSource, folder: Path) -> None:
        # In a file: what goes through the pipe to a new process makes this one wait until that one has imported what it is made of.
        self._file = folder / f"prompts-{os.getpid()}.pickle"
        self._file.write_bytes(pickle.dumps(source))
        context = multiprocessing.get_context("spawn")
        lifeline, self._life = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(lifeline,))
        for _ in range(count):  # a pool starts one of its processes each time that none is idle
            self._pool.submit(_source, self._file)

    def prepare(self, draw: Draw) -> Future[bytes]:
        return self._pool.submit(_prepare, self._file, draw)

    def close(self) -> None:
        self._life.close()
        self._pool.shutdown(cancel_futures=True)
        self._file.unlink(missing_ok=True)


def _begin(lifeline: Connection) -> None:
    """A worker begins."""
    os.nice(NICENESS)
    threading.Thread(target=_live_with, args=(lifeline,), name="lifeline", daemon=True).start()


def _live_with(lifeline: Connection) -> None:
    """End this process, whatever it is at, when the rank closes its end of the pipe or dies."""
    try:
        lifeline.recv_bytes()
    except EOFError:
        os._exit(0)


@cache
def _source(file: Path) -> PromptSource:
    return cast("PromptSource", pickle.loads(file.read_bytes()))


def _prepare(file: Path, draw: Draw) -> bytes:
    """The prompt, pickled here, where what does not pickle can still be told with its row."""
    from grpo_workload.prompt_making import PromptError

    prompt = _source(file).prepare(draw)
    try:
        return pickle.dumps(prompt)
    except Exception as error:  # pickle raises what the objects do
        raise PromptError(
            f"dataset: row {draw.index} has a column that cannot leave its worker process ({type(error).__name__}: {error}); have "
            "dataset.preprocess leave it out, or set dataset.dataloaderNumWorkers to 0"
        ) from error
