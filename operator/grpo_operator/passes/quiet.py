"""Looks at jobs to which nothing happens, which cost next to nothing: thousands of them are looked at all the time.

A plan depends on the job, its children, the answers of its launchers and the time. Where nobody answers and nothing has
changed since a pass that found nothing to do, only deadlines can make another pass find more.
"""

from __future__ import annotations

import asyncio

from grpo_operator.decide.next_pass import is_quiet, seconds_to_deadline
from grpo_operator.decide.plan import Plan
from grpo_operator.passes.jobs import Jobs, Quiet, Round
from grpo_operator.passes.launchers import Launchers
from grpo_operator.passes.snapshot import Snapshot
from grpo_operator.runtime.kept import Key, Versions
from grpo_operator.runtime.mirror import Mirror

LONGEST_SECONDS = 600.0
"""Seconds after which a quiet job has a whole pass nevertheless.
It comes sooner, the shorter the job has been quiet."""


class QuietJobs:
    """Knows which jobs are quiet."""

    def __init__(self, jobs: Jobs, mirror: Mirror, launchers: Launchers) -> None:
        self._jobs, self._mirror, self._launchers = jobs, mirror, launchers

    def look(self, key: Key, versions: Versions) -> float | None:
        """Return the seconds to the next look at a job that is as quiet as before, None if it needs a whole pass.

        `versions`: those of the mirror now.
        """
        state, now = self._jobs.of(key), asyncio.get_running_loop().time()
        quiet = state.quiet
        if (
            quiet is None
            or quiet.versions != versions
            or now >= min(quiet.until, quiet.deadline)
            or state.answers.progress
        ):
            return None
        delay = max(quiet.delay, self._jobs.intervals.seconds(runs=bool(state.runs)))
        if quiet.round is not None:
            self._launchers.follow(key, quiet.round, delay * 0.9)
        return min(delay, max(0.2, quiet.deadline - now))

    def note(
        self, key: Key, versions: Versions, seen: Snapshot, decided: Plan, delay: float, asked: Round | None
    ) -> None:
        """Note a pass that changed nothing, if another one would find nothing to do either, be it because its status
        still waits for its turn to be written. `delay`: seconds until another one was due. `asked`: its question.
        """
        state, now = self._jobs.of(key), asyncio.get_running_loop().time()
        before, state.quiet = state.quiet, None
        if state.answers.progress or not is_quiet(decided.status, seen.observed):
            return
        since = before.since if before is not None and before.versions == versions else now
        deadline = now + seconds_to_deadline(seen.job, decided.status, seen.observed, seen.now)
        if state.writes.due is not None:
            deadline = min(deadline, state.writes.due)
        until = now + min(LONGEST_SECONDS, max(2 * delay, now - since))
        if state.question is not None:  # why a pod is missing, or waits, nothing that is watched tells
            until = min(until, state.question.due)
        state.quiet = Quiet(versions, since, until, deadline, delay, asked)
