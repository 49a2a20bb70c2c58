"""Prompts of a rank, prepared by worker processes ahead of their step, so that no step waits for a slow row.

A prompt depends only on its row, its step and its position in the step: neither on the number of workers nor on which
one prepares it. Workers are spawned, since a forked copy of a rank must not touch its GPU, and run at a lower priority
than the rank. Each of them imports this module, so it loads no torch.
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
from typing import cast

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prompt_maker import PreprocessError, PromptError
from grpo_workload.data.prompt_source import Draw, PromptSource

NICENESS = 10  # added to the niceness of the rank


class PromptLoader:
    """The prompts of one rank: those at positions `share` of each of `steps`, taken in order."""

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
        """Start `num_workers` processes, which load what they need; with 0, `take` prepares prompts itself.

        Args:
            source: where prompts come from; with workers it must pickle, and is written to `folder` for them.
            share: positions of this rank's prompts in a step.
            prompts_per_step: number of prompts in a step, over all ranks.
            steps: the steps that the loop will take.
            num_workers: number of processes.
            prefetch_steps: number of steps that workers are ahead.
            timeout_seconds: how long other ranks wait for this one. `take` gives up after 0.9 of it.
            folder: for the file that workers read, one for each rank.
        """
        self._source, self._share, self._prompts_per_step, self._steps = source, share, prompts_per_step, steps
        self._prefetch_steps, self._patience = prefetch_steps, 0.9 * timeout_seconds
        self._pending: dict[int, list[tuple[Draw, Future[bytes]]]] = {}
        self._workers = _Workers(num_workers, source, folder) if num_workers and share else None

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of this rank at `step`.

        Raises:
            PromptError: a prompt cannot be used; the message names its row.
            PreprocessError: a prompt could not be prepared this time; the message names its row.
        """
        if self._workers is None:
            return [self._source.prepare(draw) for draw in self._draws(step)]
        for ahead in range(step, min(step + self._prefetch_steps + 1, self._steps.stop)):
            if ahead not in self._pending:
                self._pending[ahead] = [(draw, self._workers.prepare(draw)) for draw in self._draws(ahead)]
        return [self._result(draw, future) for draw, future in self._pending.pop(step)]

    def further(self, step: int, slots: Sequence[int]) -> list[Prompt]:
        """Return prompts of `step` beyond its own, prepared now; see `PromptSource.draw`. Raises as `take`."""
        draws = [self._source.draw(step, slot, self._prompts_per_step) for slot in slots]
        if self._workers is None:
            return [self._source.prepare(draw) for draw in draws]
        futures = [self._workers.prepare(draw) for draw in draws]
        return [self._result(draw, future) for draw, future in zip(draws, futures, strict=True)]

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._workers is not None:
            self._workers.close()

    def _draws(self, step: int) -> list[Draw]:
        return [self._source.draw(step, position, self._prompts_per_step) for position in self._share]

    def _result(self, draw: Draw, future: Future[bytes]) -> Prompt:
        try:
            return cast(Prompt, pickle.loads(future.result(self._patience)))
        except BrokenProcessPool as error:
            raise PreprocessError(
                f"dataset: a worker process died before row {draw.index} was prepared; if it ran out of memory, lower "
                "dataset.dataloaderNumWorkers or raise resources.limits.memory"
            ) from error
        except TimeoutError as error:
            raise PreprocessError(
                f"dataset: row {draw.index} was not prepared within {math.floor(self._patience)} s; "
                "if dataset.preprocess is slow but not stuck, raise dataset.dataloaderNumWorkers, "
                "dataset.prefetchSteps, or rendezvous.timeoutSeconds"
            ) from error


class _Workers:
    """Worker processes, which end when the pipe from this process closes."""

    def __init__(self, count: int, source: PromptSource, folder: Path) -> None:
        # A file, because sending the source through the pipe to a new worker would block until the worker has imported
        # the modules of its classes.
        self._file = folder / f"prompts-{os.getpid()}.pickle"
        self._file.write_bytes(pickle.dumps(source))
        context = multiprocessing.get_context("spawn")
        lifeline, self._life = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(lifeline,))
        for _ in range(count):  # start all workers now: each task starts another process while none is idle
            self._pool.submit(_source, self._file)

    def prepare(self, draw: Draw) -> Future[bytes]:
        return self._pool.submit(_prepare, self._file, draw)

    def close(self) -> None:
        self._life.close()
        self._pool.shutdown(cancel_futures=True)
        self._file.unlink(missing_ok=True)


def _begin(lifeline: Connection) -> None:
    """Initialize a worker."""
    os.nice(NICENESS)
    threading.Thread(target=_live_with, args=(lifeline,), name="lifeline", daemon=True).start()


def _live_with(lifeline: Connection) -> None:
    """End this process, whatever it is doing, when the rank closes its end of the pipe or dies."""
    try:
        lifeline.recv_bytes()
    except EOFError:
        os._exit(0)


@cache
def _source(file: Path) -> PromptSource:
    return cast(PromptSource, pickle.loads(file.read_bytes()))


def _prepare(file: Path, draw: Draw) -> bytes:
    """Prepare the prompt and pickle it here, so that an error of pickle can name the row."""
    prompt = _source(file).prepare(draw)
    try:
        return pickle.dumps(prompt)
    except Exception as error:  # pickle raises whatever the objects raise
        raise PromptError(
            f"dataset: row {draw.index} has a column that does not pickle ({type(error).__name__}: {error}), so it "
            "cannot leave its worker process; drop it in dataset.preprocess, or set dataset.dataloaderNumWorkers to 0"
        ) from error
