"""Asks the launchers of running jobs for their progress, apart from passes: a silent launcher holds up no job.

An answer wakes the job, and its next passes read it here. A launcher that does not answer means unknown progress, which
alone causes no action.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from grpo_operator.decide.blame import Reports
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.jobs import Answers, Jobs, Round
from grpo_operator.passes.progress_client import ProgressSource
from grpo_operator.runtime.kept import Key
from grpo_spec.reports import Progress

AT_ONCE = 256
"""Number of launchers that are asked at the same time, of all jobs."""


class Launchers:
    """Asks for the newest answers, which are kept in the state of each job."""

    def __init__(
        self, source: ProgressSource | None, jobs: Jobs, wake: Callable[[Key], None], instruments: Instruments
    ) -> None:
        """`source` None: no launcher is ever asked."""
        self._source, self._jobs, self._wake, self._instruments = source, jobs, wake, instruments
        self._slots = asyncio.Semaphore(AT_ONCE)

    def reports(self, key: Key, pods: Sequence[ObservedPod]) -> Reports:
        """Return what these pods answered last, by name. A pod that ended has nothing to say: its outcome has."""
        answers = self._jobs.of(key).answers.progress
        return {pod.name: answers[pod.uid] for pod in pods if pod.uid in answers and pod.outcome is None}

    def follow(self, key: Key, plan: Round, seconds: float) -> None:
        """Ask once, `seconds` from now, or at once if rank 0's pod was never asked.

        Replaces an earlier call, but puts off no round: passes may come more often than rounds.
        """
        kept = self._jobs.of(key).answers
        asked = [pod for pod in plan.pods if pod.ip is not None and pod.outcome is None]
        if self._source is None or kept.is_asking:
            return
        now = asyncio.get_running_loop().time()
        due = min(now + seconds, kept.stop())
        if not asked or asked[0] is not plan.pods[0]:
            kept.progress = {}
            return
        wait = due - now if kept.asked == asked[0].uid else 0.0
        kept.due = due
        kept.round = asyncio.create_task(self._ask(key, kept, plan, asked, wait), name=f"ask {key.name}")

    def stop(self, key: Key) -> None:
        """Ask a job no more, and drop its answers."""
        self._jobs.of(key).answers.clear()

    async def close(self) -> None:
        """Stop asking."""
        tasks = [state.answers.round for state in self._jobs if state.answers.round is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: Key, kept: Answers, plan: Round, pods: Sequence[ObservedPod], wait: float) -> None:
        await asyncio.sleep(wait)
        kept.is_asking = True
        try:
            kept.asked = pods[0].uid
            answers = await self._fetch(pods[:1], plan.port)
            if (first := answers.get(pods[0].uid)) is not None and plan.asks_all(first):
                answers |= await self._fetch(pods[1:], plan.port)
            kept.progress, kept.due, kept.round = answers, math.inf, None
        finally:
            kept.is_asking = False
        if answers:
            self._wake(key)

    async def _fetch(self, pods: Sequence[ObservedPod], port: int) -> dict[str, Progress]:
        answers = await asyncio.gather(*(self._one(pod.ip or "", port) for pod in pods))
        return {pod.uid: said for pod, said in zip(pods, answers, strict=True) if said is not None}

    async def _one(self, ip: str, port: int) -> Progress | None:
        assert self._source is not None
        async with self._slots:
            said = await self._source.fetch(ip, port)
        self._instruments.asked(answered=said is not None)
        return said
