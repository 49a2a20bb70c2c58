"""The cause for which a pod that should exist does not: somebody else has its name, or the cluster refuses it.

Nothing that is watched tells. So the API server is asked about the first pod that is missing: only after seconds, and
then less and less often, as its controller tries again.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.absent import Missing, explain, find_missing
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.topology import Topology
from grpo_operator.passes.children import error_note
from grpo_operator.passes.jobs import Jobs, Question
from grpo_operator.passes.preflight import find_taken
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ForbiddenError
from grpo_operator.runtime.kept import Key
from grpo_spec.reasons import Reason

FIRST_SECONDS, LAST_SECONDS = 4.0, 32.0
"""Seconds for which a pod is missing before the first question, and between two at most; each wait doubles."""


class AbsentPods:
    """Explains missing pods."""

    def __init__(self, cluster: Cluster, jobs: Jobs) -> None:
        self._cluster, self._jobs = cluster, jobs

    async def explain(
        self, key: Key, status: GRPOJobStatus, topology: Topology, seen: Observed
    ) -> tuple[Reason, str] | None:
        """Return why the first missing pod does not exist (reason, message); None if none is missing, or as long as
        nothing is known.
        """
        state, time = self._jobs.of(key), asyncio.get_running_loop().time()
        if (missing := find_missing(status, topology, seen)) is None:
            state.question = None
            return None
        about, asked = (missing.pod, missing.child.uid), state.question
        if asked is None or asked.about != about:
            asked = state.question = Question(about, FIRST_SECONDS, time + FIRST_SECONDS)
        if time >= asked.due:
            asked.wait = min(2 * asked.wait, LAST_SECONDS)
            asked.due = time + asked.wait
            with error_note(f"reading why {missing.pod or 'the pod that downloads'} does not exist"):
                asked.answer = await self._ask(key, missing, seen, status.attempt_start_time)
        return asked.answer

    async def _ask(
        self, key: Key, missing: Missing, seen: Observed, began: datetime | None
    ) -> tuple[Reason, str] | None:
        if missing.pod and (taken := await find_taken(self._cluster, key.namespace, missing.pod, seen)):
            return Reason.NAME_TAKEN, taken
        try:
            events = await self._cluster.events(key.namespace, missing.child.uid, "FailedCreate")
        except ForbiddenError:
            return None  # with the roles of an earlier release; the message names a command that shows the same
        return explain(missing, events, began)
