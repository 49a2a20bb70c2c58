"""The pace of looks at jobs to which nothing happens, and of writes of a status that brings no urgent news: how
many pods are ready, or how far the training is.

Such a write costs the API server ten milliseconds, which pods that start at the same moment need more. So a job
writes them every few seconds, and all jobs together so many a second. Where hundreds start at once, most jobs say
nothing between that they begin and that they run; where hundreds train, the step that a status shows is older.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from grpo_operator.decide.record import PROGRESS_SECONDS
from grpo_operator.decide.second_look import News


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds between two writes of one job at least, and writes a second of all jobs together."""

    seconds: float
    all_jobs: float


RATES = {News.DETAILS: Rate(5.0, 2.0), News.PROGRESS: Rate(PROGRESS_SECONDS, 10.0)}
"""Details take about a fortieth of one processor, progress an eighth: with 1,000 jobs it is written every 100 s."""

LOOKS_PER_SECOND = 50.0
"""Timer-driven passes per second, summed over all running jobs: about a tenth of one processor, with a question to the
launcher of each job that trains. Jobs that wait for their pods have the same budget of their own."""

AHEAD_SECONDS = 1.0
"""Seconds before its turn at which a status is written: else every second write costs another pass."""


@dataclass(slots=True, eq=False)
class Writes:
    """Writes of one job's status: when the last one was, None if that is not known, and when the next one may be, None
    if nothing waits.
    """

    last: float | None = None
    due: float | None = None


class _Queue:
    """The jobs that have news of one kind, and the turns of those that are due, in the order of the turns."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.jobs: set[Writes] = set()
        self._turns: dict[Writes, float] = {}
        self._last = -1 / rate.all_jobs

    def wait(self, job: Writes, now: float) -> float:
        """Return the seconds until a job may write, 0 if it may now."""
        self.jobs.add(job)
        if (turn := self._turns.get(job)) is None:
            pause = max(self.rate.seconds, len(self.jobs) / self.rate.all_jobs)
            if job.last is not None and now < job.last + pause:
                return job.last + pause - now
            # Many are due at one time, as after a start of the operator.
            latest = max(self._last, next(reversed(self._turns.values()), self._last))
            turn = self._turns[job] = max(now, latest + 1 / self.rate.all_jobs)
        if turn > now + AHEAD_SECONDS:
            return turn - now
        self._last = max(self._last, turn)
        del self._turns[job]
        return 0.0

    def leave(self, job: Writes) -> None:
        """Drop a job and its turn."""
        self.jobs.discard(job)
        self._turns.pop(job, None)


class WriteRates:
    """Knows which jobs have something to write."""

    def __init__(self) -> None:
        self._queues: dict[News, _Queue] = {news: _Queue(rate) for news, rate in RATES.items()}

    def wait(self, job: Writes, news: News, now: float) -> float:
        """Return the seconds until the status of a job may be written, 0 if it may be now.

        Until `written` or `settled`, the job is one of those that wait, and delays the others.
        """
        for other, queue in self._queues.items():
            if other != news:
                queue.leave(job)
        seconds = self._queues[news].wait(job, now) if news in self._queues else 0.0
        job.due = now + seconds if seconds > 0 else None
        return seconds

    def written(self, job: Writes, now: float) -> None:
        """Note that the status of a job was written, with all that it has to say."""
        self.settled(job)
        job.last = now

    def settled(self, job: Writes) -> None:
        """Note that the status of a job has nothing new to say, or that the job no longer exists."""
        job.due = None
        for queue in self._queues.values():
            queue.leave(job)


class PassIntervals:
    """Knows how many jobs are looked at by time alone. Many that wait for GPUs slow down nobody who trains."""

    def __init__(self) -> None:
        self._jobs: Counter[bool | None] = Counter()

    def seconds(self, *, runs: bool) -> float:
        """Return the seconds between two looks at a job at least."""
        return self._jobs[runs] / LOOKS_PER_SECOND

    def move(self, before: bool | None, after: bool | None) -> None:
        """Note whether a job runs, if it is looked at by time alone; None: only a change calls for the next pass."""
        self._jobs[before] -= 1
        self._jobs[after] += 1
