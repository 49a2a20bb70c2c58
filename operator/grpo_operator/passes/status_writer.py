"""Writes of what a pass decided about a job: its status if it changed, its events, and metrics of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.plan import Plan
from grpo_operator.decide.second_look import news
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.children import gather_all
from grpo_operator.passes.jobs import Jobs
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.transport import Object
from grpo_spec.schema import dump

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes statuses, at the rates that there are for them, and creates the events of those that it wrote."""

    def __init__(
        self, cluster: Cluster, mirror: Mirror, jobs: Jobs, clock: Callable[[], datetime], instruments: Instruments
    ) -> None:
        self._cluster, self._mirror, self._jobs = cluster, mirror, jobs
        self._clock, self._instruments = clock, instruments

    async def write(self, key: Key, raw: Object, old: GRPOJobStatus, decided: Plan) -> tuple[float | None, bool]:
        """Write the status if it changed. Return the seconds until the next pass is due, and whether it was written."""
        new, time = decided.status, asyncio.get_running_loop().time()
        if new == old:
            self._jobs.rates.settled(self._jobs.of(key).writes)
            return decided.requeue_after, False
        if (wait := self._jobs.rates.wait(self._jobs.of(key).writes, news(old, new), time)) > 0:
            return min(wait, decided.requeue_after or wait), False
        status = dump(new)
        answer = await self._cluster.write_status(raw, status)
        # As it was written: an older CRD drops fields, which would be written again in each pass, and never be known.
        self._mirror.renew_job(answer | {"status": status})
        self._jobs.rates.written(self._jobs.of(key).writes, time)
        self._measure(key, raw, old, new)
        return decided.requeue_after, True

    async def emit(self, raw: Object, decided: Plan | None, now: datetime) -> None:
        """Create the events of a plan whose status was written."""
        events, metadata = decided.events if decided else (), raw["metadata"]
        for event in events:
            log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
        await gather_all(
            self._cluster.emit(raw, kind=one.type, reason=one.reason, message=one.message, now=now) for one in events
        )

    def _measure(self, key: Key, raw: Object, old: GRPOJobStatus, new: GRPOJobStatus) -> None:
        self._instruments.status_written(key)
        if new.restarts.total > old.restarts.total and new.last_failure is not None:
            self._instruments.restarted(key.namespace, new.last_failure.reason)
        if new.attempt != old.attempt:
            created = datetime.fromisoformat(raw["metadata"]["creationTimestamp"])
            # A job whose spec was changed before its first attempt (fixed, or resumed) waited for its user, not for the
            # operator.
            fresh = new.attempt == 0 and new.observed_generation == 1
            self._instruments.attempt_begun(key, waited=(self._clock() - created).total_seconds() if fresh else None)
