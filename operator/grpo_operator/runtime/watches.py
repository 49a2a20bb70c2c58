"""Keeps the mirror up to date: for each kind a consistent list, then a watch from its version, again and again.

A watch that ends or breaks is continued from the last version that it showed. Only if the API server no longer has that
version (410), if events come out of order, and once an hour, the kind is listed again; the list replaces all that the
mirror holds of it.

An optional kind that the API server serves but does not list, for example because an upgrade has left objects that it
cannot read, keeps only those jobs waiting that need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.complaints import Complaints
from grpo_operator.runtime.errors import Expected, ForbiddenError, ObstacleError, expected, reason_of
from grpo_operator.runtime.kept import Place
from grpo_operator.runtime.mirror import DisorderError, Mirror
from grpo_operator.runtime.scopes import Scope
from grpo_spec.reasons import Reason

Object = Mapping[str, Any]
log = logging.getLogger(__name__)

PAGE = 500
"""Number of objects that are listed with one request."""

RELIST_SECONDS = 3600.0
"""Seconds between two lists although nothing calls for one: an event that was lost costs at most this."""

AFTER_INTERRUPTION_SECONDS = 3.0
"""Seconds from the end of a watch to the list of all jobs: kopf's own watch is back by then."""

BETWEEN_CHECKS_SECONDS = 15.0
"""Seconds between two such lists at least."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.2, 30.0

_PASSES = (None, 410, 429, 503, 504)
"""Statuses of answers that say nothing about a kind: none came, a page was too old, the API server is busy."""


class Source(Protocol):
    """A source of objects; `Cluster` is one."""

    async def page(self, kind: str, namespace: str | None, selector: str, limit: int, token: str) -> dict[str, Any]:
        """Return a part of a consistent list."""
        ...

    def watch(self, kind: str, namespace: str | None, selector: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield watch events after a version, until the server ends the watch."""
        ...


class Watches:
    """Follows all scopes of a mirror, each with a task that never ends."""

    def __init__(self, source: Source, mirror: Mirror, instruments: Instruments) -> None:
        self._source, self._mirror, self._instruments = source, mirror, instruments
        self._interrupted = asyncio.Event()
        self._complaints = Complaints(log)
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow; `mirror.synced` is set once each scope was listed, or need not be waited for."""
        for scope in self._mirror.scopes:
            self._instruments.mirror.heard(scope.kind)  # the age of one that is never listed counts from here
        self.tasks = [
            asyncio.create_task(self._follow(scope), name=f"watch {scope.kind}") for scope in self._mirror.scopes
        ]
        self.tasks.append(asyncio.create_task(self._check_jobs(), name="check jobs"))

    async def close(self) -> None:
        """Stop following."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _follow(self, scope: Scope) -> None:
        reason, backoff, loop = "start", _Backoff(), asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._list(scope, reason)
                reason = await self._watch_until_relist(scope)
            except Exception as error:  # whatever it is, the mirror must not fall silent
                self._complain(scope.kind, error)
                if not scope.is_listed and (obstacle := _obstacle(scope.kind, error)) is not None:
                    self._mirror.go_without(scope, obstacle)
            await backoff.pause(worked=loop.time() - began > _LAST_BACKOFF)

    async def _check_jobs(self) -> None:
        """List the jobs once an hour, and after an interruption: kopf, which watches them, then misses deletions.

        Interruptions that come one after another cost few lists.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), RELIST_SECONDS)
            self._interrupted.clear()
            await asyncio.sleep(AFTER_INTERRUPTION_SECONDS)
            try:
                for namespace in {scope.namespace for scope in self._mirror.scopes}:
                    listed = await self._all(names.KIND, namespace, "", self._mirror.list_jobs)
                    self._mirror.end_list_of_jobs(namespace, *listed)
            except Exception as error:  # whatever it is, the next round will do
                self._complain(names.KIND, error)
                self._interrupted.set()
            await asyncio.sleep(BETWEEN_CHECKS_SECONDS)

    async def _all(
        self, kind: str, namespace: str | None, selector: str, take: Callable[[list[Object]], set[Place]]
    ) -> tuple[set[Place], str]:
        """Take in a consistent list, page by page: thousands of pods are hundreds of MiB until they are taken in.

        Returns the places of all objects, and the version of the list.
        """
        found: set[Place] = set()
        token = ""
        while True:
            part = await self._source.page(kind, namespace, selector, PAGE, token)
            found |= take(part["items"])
            if not (token := part["metadata"].get("continue", "")):
                return found, part["metadata"]["resourceVersion"]

    async def _list(self, scope: Scope, reason: str) -> None:
        """Replace what the mirror holds of the scope."""
        take = partial(self._mirror.list_part, scope)
        listed = await self._all(scope.kind, scope.namespace, names.SELECTOR_MANAGED, take)
        self._mirror.end_list(scope, *listed)
        self._instruments.listed(scope.kind, reason)
        self._instruments.mirror.heard(scope.kind)

    async def _watch_until_relist(self, scope: Scope) -> str:
        """Watch from the mirror's version on. Return why the scope must be listed again."""
        loop, backoff = asyncio.get_running_loop(), _Backoff()
        end = loop.time() + RELIST_SECONDS * random.uniform(0.9, 1.1)
        while (began := loop.time()) < end:
            before, broke = scope.version, False
            try:
                async for event in self._source.watch(
                    scope.kind, scope.namespace, names.SELECTOR_MANAGED, str(scope.version)
                ):
                    self._instruments.mirror.heard(scope.kind)
                    if event["type"] == "ERROR":
                        raise ApiException(status=event["object"].get("code"), reason=event["object"].get("message"))
                    self._take(scope, event)
            except DisorderError as error:
                log.warning("the watch of %s is out of order: %s", scope.kind, error)
                return "disorder"
            except Exception as error:
                self._interrupted.set()
                if isinstance(error, ApiException) and error.status == 410:
                    return "expired"
                log.info("the watch of %s broke and is continued: %s", scope.kind, _said(error))
                broke = True
            # One that was quiet for long worked too: proxies cut off connections on which nothing is sent.
            worked = scope.version > before or loop.time() - began > _LAST_BACKOFF
            if broke or not worked:
                await backoff.pause(worked=worked)
        return "hourly"

    def _complain(self, kind: str, error: Exception) -> None:
        known = expected(error) or Expected((kind, str(error)), f"{type(error).__name__} {error}")
        self._complaints.say(known.subject, "listing %s failed and is tried again: %s", kind, known.text)

    def _take(self, scope: Scope, event: Object) -> None:
        try:
            self._mirror.changed(scope, event["type"], event["object"])
        except DisorderError:
            raise
        except Exception:  # one object, whatever it holds, must not end the watch of all
            log.exception("an event about %s is ignored", event["object"].get("metadata", {}).get("name"))


class _Backoff:
    """Pauses between tries, twice as long each time until one has worked."""

    def __init__(self) -> None:
        self._seconds = _FIRST_BACKOFF

    async def pause(self, *, worked: bool) -> None:
        """Wait after a try."""
        seconds = _FIRST_BACKOFF if worked else self._seconds
        self._seconds = min(seconds * 2, _LAST_BACKOFF)
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))


def _obstacle(kind: str, error: Exception) -> ObstacleError | None:
    """Return why jobs that need an optional kind must wait; None where an answer is worth waiting for."""
    if kind not in names.OPTIONAL_KINDS:
        return None
    if isinstance(error, ForbiddenError):
        return error
    if not isinstance(error, ApiException) or error.status in _PASSES:
        return None
    return ObstacleError(Reason.PASS_FAILED, f"the API server does not list {kind}s: {reason_of(error)}")


def _said(error: Exception) -> str:
    if isinstance(error, ApiException):
        return reason_of(error)
    return str(error) if isinstance(error, ForbiddenError) else f"{type(error).__name__} {error}"
