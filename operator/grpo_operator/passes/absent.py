"""The cause for which a pod that should exist does not: somebody else has its name, or the cluster refuses it.

Nothing that is watched tells. So the API server is asked about the first pod that is missing: only after seconds, and
then less and less often, as its controller tries again. Events are read once for all jobs of a namespace: the API
server goes through all of them for each list, which thousands of waiting jobs would make it do all the time.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.absent import Missing, explain, find_missing
from grpo_operator.decide.objects import Object
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.topology import Topology
from grpo_operator.passes.children import error_note
from grpo_operator.passes.jobs import Jobs, Question
from grpo_operator.passes.preflight import find_taken
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ForbiddenError
from grpo_operator.runtime.kept import Key
from grpo_spec.lenient import mapping, text
from grpo_spec.reasons import Reason

FIRST_SECONDS, LAST_SECONDS = 4.0, 32.0
"""Seconds for which a pod is missing before the first question, and between two at most; each wait doubles."""


READING_SHARE = 0.05
"""Share of the time for which the events of a namespace are read at most."""


class AbsentPods:
    """Explains missing pods."""

    def __init__(self, cluster: Cluster, jobs: Jobs) -> None:
        self._cluster, self._jobs = cluster, jobs
        self._refusals = Refusals(cluster)

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
            last = asked.due - asked.wait
            asked.wait = min(2 * asked.wait, LAST_SECONDS)
            asked.due = time + asked.wait
            with error_note(f"reading why {missing.pod or 'the pod that downloads'} does not exist"):
                asked.answer = await self._ask(key, missing, seen, status.attempt_start_time, last)
        return asked.answer

    async def _ask(
        self, key: Key, missing: Missing, seen: Observed, began: datetime | None, last: float
    ) -> tuple[Reason, str] | None:
        if missing.pod and (taken := await find_taken(self._cluster, key.namespace, missing.pod, seen)):
            return Reason.NAME_TAKEN, taken
        try:
            events = await self._refusals.of(key.namespace, missing.child.uid, last)
        except ForbiddenError:
            return None  # with the roles of an earlier release; the message names a command that shows the same
        return explain(missing, events, began)


@dataclass
class _Read:
    """Events of a namespace, by the object that they are about."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while they are read
    begin: float = -math.inf  # when they were asked for
    until: float = -math.inf  # when they may be read again
    by_uid: Mapping[str, list[Object]] = field(default_factory=dict)


class Refusals:
    """The events about pods that were refused, which all jobs of a namespace share."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read: dict[str, _Read] = {}

    async def of(self, namespace: str, uid: str, since: float) -> list[Object]:
        """Return those about the object with this UID, read after `since`, a time of the loop, or soon before it.

        Raises what `Cluster.events` does, but to one of those that wait for it.
        """
        now = asyncio.get_running_loop().time
        for name, one in [*self._read.items()]:
            if name != namespace and not one.lock.locked() and now() > max(one.until, one.begin + LAST_SECONDS):
                del self._read[name]
        read = self._read.setdefault(namespace, _Read())
        async with read.lock:
            begin = now()
            if read.begin <= since and begin >= read.until:
                try:
                    events = await self._cluster.events(namespace, "FailedCreate")
                except Exception:
                    # Others that wait get what was known: they would fail one after the other, each by its own list.
                    read.until = now() + min((now() - begin) / READING_SHARE, LAST_SECONDS)
                    raise
                found: dict[str, list[Object]] = defaultdict(list)
                for event in events:
                    found[text(mapping(event.get("regarding")).get("uid"))].append(event)
                read.by_uid, read.begin, read.until = found, begin, now() + (now() - begin) / READING_SHARE
        return [*read.by_uid.get(uid, ())]
