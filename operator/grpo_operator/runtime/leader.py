"""The operator that acts, of several: the one that holds a Lease.

The client library decides who may take the Lease (`LeaderElection.try_acquire_or_renew`). The rest is here, because the
library's own loop is not safe to act on:

* Its requests may take five minutes, and aiohttp's errors end it. So an API server that hangs keeps a leader that
  nobody has renewed. Here every request has a deadline.
* It counts the renew deadline again after each pause, from the answer. Two pauses and a slow answer outlast the Lease.
  Here the deadline counts from the moment before the request that renewed the Lease, and a timer keeps it.
* A leader whose Lease another has taken tries on until the deadline. Here it stops at once.
* It reads the wall clock, which may jump, to tell whether another's Lease is over. `_Lock` asks the loop's clock too.
* It reads the Lease before each renewal. With an API server that takes seconds for an answer, two requests outlast the
  renew deadline. Here the leader writes to the Lease as its last renewal left it, as client-go does.
* `LeaseLock` cannot create a Lease (the client refuses its argument `pretty`), writes local time as UTC, and never
  gives the Lease back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from grpo_operator.runtime.complaints import Complaints
from grpo_operator.runtime.errors import reason_of

T = TypeVar("T")
log = logging.getLogger(__name__)

REQUEST_SECONDS = 4.0
"""Seconds for one request about the Lease: within the renew deadline there is time for a second try."""


class NotLeadingError(Exception):
    """The operator wanted to write, but does not hold the Lease, or another may hold it by now."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of an election.

    `lease`: without a renewal for so long, another may lead. `renew`: the leader itself stops after so long. `retry`:
    between two tries. The values are those of client-go's own controllers: on a busy machine, an operator of 3,000 jobs
    could not renew within 7 s.
    """

    lease: int = 15
    renew: float = 10.0
    retry: float = 2.0


class Leadership:
    """One operator's part in the election for the Lease `namespace`/`name`.

    `leading` is set while this operator holds the Lease. `identity` must be unique among the processes that run at one
    time; a process that replaces another may have its identity, and then leads at once. `on_lost` is called when the
    Lease is lost, before another may hold it; it must end the process, or whatever writes.
    """

    def __init__(
        self,
        api: client.ApiClient,
        namespace: str,
        name: str,
        identity: str,
        on_lost: Callable[[], None],
        timing: Timing = Timing(),
    ) -> None:
        self._clock = asyncio.get_running_loop().time
        self._lock = _Lock(api, namespace, name, identity, timing, self._clock)
        self._election = LeaderElection(
            Config(self._lock, timing.lease, timing.renew, timing.retry, _not_used, onstopped_leading=_not_used)
        )
        self._on_lost, self._timing = on_lost, timing
        self._until = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        self._running: asyncio.Task[Any] | None = None
        self.leading = asyncio.Event()

    async def run(self) -> None:
        """Take the Lease when it is free, and renew it until it is lost."""
        self._running = asyncio.current_task()
        while not self._lost:
            asked = self._clock()
            if await self._election.try_acquire_or_renew():
                self._hold(asked + self._timing.renew)
            elif self.leading.is_set() and self._lock.holder != self._lock.identity:
                self._lose(f"{self._lock.holder or 'somebody'} has taken it")
            await asyncio.sleep(max(0.0, asked + self._timing.retry - self._clock()))

    def check(self) -> None:
        """Raise NotLeadingError if another may lead by now. Call it right before each write.

        A process that was paused, or whose loop was blocked, continues what it was doing before any timer runs.
        """
        if self._clock() >= self._until:
            raise NotLeadingError(f"the Lease {self._lock.name} is not held")

    async def close(self) -> None:
        """End `run`, and give the Lease back if it is held. Call it when nothing is written any more."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if self._timer is not None:
            self._timer.cancel()
        self._until = -math.inf
        if self.leading.is_set():
            self.leading.clear()
            await self._lock.release()

    def _hold(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._until = until
        reason = f"it was not renewed for {self._timing.renew:g} s"
        self._timer = asyncio.get_running_loop().call_at(until, self._lose, reason)
        if not self.leading.is_set():
            log.info("%s leads: it holds the Lease %s", self._lock.identity, self._lock.name)
            self.leading.set()

    def _lose(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._until, self._lost = -math.inf, True
        self.leading.clear()
        log.critical("%s does not lead any more: the Lease %s: %s", self._lock.identity, self._lock.name, reason)
        self._on_lost()


class _Lock(LeaseLock):  # type: ignore[misc]
    """The library's Lease, with deadlines, and with a clock that does not jump."""

    def __init__(
        self,
        api: client.ApiClient,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(name, namespace, identity, api)
        self._timing, self._clock = timing, clock
        self._version: str | None = None
        self._changed = -math.inf
        self._complaints = Complaints(log)
        self._is_as_written = False  # `lease_reference` is what this operator wrote last, and as far as it knows holds

    @property
    def holder(self) -> str | None:
        """Holder of the Lease as it was last read."""
        spec = self.lease_reference.spec if self.lease_reference else None
        return spec.holder_identity or None if spec else None

    async def get(self, name: str, namespace: str) -> Any:
        if self._is_as_written:
            return True, self.election_record(self.lease_reference)
        found = await _answer(super().get(name, namespace))
        if isinstance(found, ApiException):
            return False, found
        if found[0] and (version := self.lease_reference.metadata.resource_version) != self._version:
            self._version, self._changed = version, self._clock()
        return found

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        return await self._write(self.api_instance.create_namespaced_lease(namespace, lease))

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        if self.holder not in (None, self.identity) and self._clock() < self._changed + self._timing.lease:
            return False  # the wall clock has jumped: the other's Lease is not over
        self.lease_reference.spec = self.update_lease(updated_record, self.lease_reference.spec)
        if await self._write(self.api_instance.replace_namespaced_lease(name, namespace, self.lease_reference)):
            return True
        if not self._is_as_written:
            await self.get(name, namespace)  # another may have taken it
        return False

    async def release(self) -> None:
        """Let another take the Lease at once. If this fails, the Lease ends by itself."""
        self._is_as_written = False
        await self.get(self.name, self.namespace)
        if self.holder == self.identity:
            self.lease_reference.spec.holder_identity = None
            await self._write(
                self.api_instance.replace_namespaced_lease(self.name, self.namespace, self.lease_reference)
            )

    async def _write(self, request: Awaitable[Any]) -> bool:
        """Send a write of the Lease, and keep the answer. Return whether it was written.

        Without an answer the same is written again, if this operator held the Lease: to read it first would take the
        time that a second try needs. Had the first one come through, the API server refuses the second.
        """
        answer = await _answer(request)
        if isinstance(answer, ApiException):
            self._is_as_written = self._is_as_written and answer.status is None
            text = "%s could not write the Lease %s: %s"
            self._complaints.say(answer.status, text, self.identity, self.name, reason_of(answer))
            return False
        self.lease_reference, self._is_as_written = answer, True
        return True

    def update_lease(self, leader_election_record: Any, current_spec: Any = None) -> Any:
        """Return the spec to write. The API server insists on microseconds, also where they are 0."""
        spec, now = current_spec or client.V1LeaseSpec(), datetime.now(UTC)
        if spec.holder_identity != self.identity:
            spec.acquire_time = now
            spec.lease_transitions = 0 if current_spec is None else (spec.lease_transitions or 0) + 1
        spec.holder_identity, spec.lease_duration_seconds = self.identity, self._timing.lease
        spec.acquire_time = (spec.acquire_time or now).isoformat(timespec="microseconds")
        spec.renew_time = now.isoformat(timespec="microseconds")
        return spec


async def _answer(request: Awaitable[T]) -> T | ApiException:
    """Return what the request returns, or why there is no answer."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return await request
    except ApiException as error:
        return error
    except (aiohttp.ClientError, OSError) as error:
        return ApiException(reason=f"{type(error).__name__} {error}".strip())


async def _not_used() -> None:
    """Stand in for the callbacks of the library's loop, which does not run here."""
