"""The cause for which a pod that should exist does not, as somebody else has its name or the cluster refuses it, or for
which its node does not prepare it.

Nothing that is watched tells. So the API server is asked about the first such pod: only after seconds, and then less
and less often, as whoever is to create or prepare it tries again. Events are read once for all jobs of a namespace: the
API server goes through all of them for each list, which thousands of waiting jobs would make it do all the time.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.absent import (
    Missing,
    explain,
    explain_unprepared,
    find_missing,
    find_unprepared,
    waiting_for,
)
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
"""Seconds for which a pod waits before the first question, and between two at most; each wait doubles."""

REFUSED = "reason=FailedCreate"
_OTHERS = ("Scheduled", "FailedScheduling", "Pulled", "Created", "Started", "Unhealthy")
UNPREPARED = "regarding.kind=Pod," + ",".join(f"reason!={one}" for one in _OTHERS)
"""Events that say why pods do not exist, and why nodes do not prepare them. The reasons left out are those of pods that
have no node yet, or run: there may be thousands."""

READING_SHARE = 0.05
"""Share of the time for which the events of a namespace are read at most."""


class AbsentPods:
    """Explains missing pods."""

    def __init__(self, cluster: Cluster, jobs: Jobs) -> None:
        self._cluster, self._jobs = cluster, jobs
        self._events = SharedEvents(cluster)

    async def explain(self, key: Key, status: GRPOJobStatus, topology: Topology, seen: Observed) -> Observed:
        """Return what is seen with why the first missing pod does not exist, or else what the first pod that is not
        prepared waits for; as it was if there is none, or as long as nothing is known.
        """
        state, time = self._jobs.of(key), asyncio.get_running_loop().time()
        missing = find_missing(status, topology, seen)
        held = None if missing else find_unprepared(status, seen)
        about = (missing.pod, missing.child.uid) if missing else (held.name, held.uid) if held else None
        if about is None:
            state.question = None
            return seen
        asked = state.question
        if asked is None or asked.about != about:
            asked = state.question = Question(about, FIRST_SECONDS, time + FIRST_SECONDS)
        if time >= asked.due:
            last = asked.due - asked.wait
            asked.wait = min(2 * asked.wait, LAST_SECONDS)
            asked.due = time + asked.wait
            with error_note(
                f"reading why {about[0] or 'the pod that downloads'} {'waits' if held else 'does not exist'}"
            ):
                asked.answer = await self._ask(key, missing, about[1], seen, status.attempt_start_time, last)
        if held is not None and asked.answer is not None:
            return waiting_for(asked.answer[1], held, seen)
        return replace(seen, why_absent=None if held else asked.answer)

    async def _ask(
        self, key: Key, missing: Missing | None, uid: str, seen: Observed, began: datetime | None, last: float
    ) -> tuple[Reason, str] | None:
        if missing and missing.pod and (taken := await find_taken(self._cluster, key.namespace, missing.pod, seen)):
            return Reason.NAME_TAKEN, taken
        try:
            events = await self._events.of(key.namespace, REFUSED if missing else UNPREPARED, uid, last)
        except ForbiddenError:
            return None  # with the roles of an earlier release; the message names a command that shows the same
        return explain(missing, events, began) if missing else explain_unprepared(events)


@dataclass
class _Read:
    """Events of a namespace, by the object that they are about."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while they are read
    begin: float = -math.inf  # when they were asked for
    until: float = -math.inf  # when they may be read again
    by_uid: Mapping[str, list[Object]] = field(default_factory=dict)


class SharedEvents:
    """Events about pods, which all jobs of a namespace share."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read: dict[tuple[str, str], _Read] = {}

    async def of(self, namespace: str, which: str, uid: str, since: float) -> list[Object]:
        """Return those about the object with this UID, read after `since`, a time of the loop, or soon before it.

        `which`: a field selector. Raises what `Cluster.events` does, but to one of those that wait for it.
        """
        now, place = asyncio.get_running_loop().time, (namespace, which)
        for name, one in [*self._read.items()]:
            if name != place and not one.lock.locked() and now() > max(one.until, one.begin + LAST_SECONDS):
                del self._read[name]
        read = self._read.setdefault(place, _Read())
        async with read.lock:
            begin = now()
            if read.begin <= since and begin >= read.until:
                try:
                    events = await self._cluster.events(namespace, which)
                except Exception:
                    # Others that wait get what was known: they would fail one after the other, each by its own list.
                    read.until = now() + min((now() - begin) / READING_SHARE, LAST_SECONDS)
                    raise
                found: dict[str, list[Object]] = defaultdict(list)
                for event in events:
                    found[text(mapping(event.get("regarding")).get("uid"))].append(event)
                read.by_uid, read.begin, read.until = found, begin, now() + (now() - begin) / READING_SHARE
        return [*read.by_uid.get(uid, ())]
