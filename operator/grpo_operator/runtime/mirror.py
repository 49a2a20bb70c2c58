"""A copy of jobs and their children, kept by watches, from which passes plan without asking the API server.

It may be behind the API server at any time. So it never decides: a pass that would change the course of a job looks
again, live (see `changes_course` in decide/second_look.py), and no child is changed without a live read or a write of
its job in the same pass.

Objects carry resourceVersions, which grow with every change and can be compared within one kind (KEP-5504). So events
that come late, twice, or after the answer to the operator's own write are recognised and change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

from grpo_operator.api import names
from grpo_operator.decide.observe import Child
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.runtime.errors import ObstacleError
from grpo_operator.runtime.kept import Kept, KeptJob, Key, Object, Place, Versions, place_of, version_of
from grpo_operator.runtime.scopes import Scope


class DisorderError(Exception):
    """A watch sends events out of order: list again."""


class Mirror:
    """The objects, by kind, namespace and name.

    `wake` is called for each job of which a child changed or that another of its name replaced, `pod_deleted` with the
    final state of each pod of a job, `job_seen` with each new state of a job, and `job_gone` when one is dropped.
    """

    def __init__(
        self,
        scopes: Iterable[Scope],
        wake: Callable[[Key], None],
        pod_deleted: Callable[[Key, ObservedPod], None],
        job_seen: Callable[[Key, Object], None],
        job_gone: Callable[[Key], None],
    ) -> None:
        self._wake, self._pod_deleted, self._job_seen, self._job_gone = wake, pod_deleted, job_seen, job_gone
        self.scopes = list(scopes)
        self.synced = asyncio.Event()
        self._objects: dict[str, dict[Place, Kept]] = {scope.kind: {} for scope in self.scopes}
        self._of_jobs: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self._jobs: dict[Place, KeptJob] = {}

    def count(self) -> dict[str, int]:
        """Return the number of objects of each kind."""
        return {names.KIND: len(self._jobs)} | {kind: len(kept) for kind, kept in self._objects.items()}

    # Jobs

    def job(self, key: Key) -> dict[str, Any] | None:
        """Return a job as last seen, or None."""
        return self._jobs[key.place].raw if self._has(key) else None

    def versions(self, key: Key) -> Versions | None:
        """Return the versions of a job and of what decisions need of the children that carry its label; None if the job
        does not exist.
        """
        if not self._has(key):
            return None
        return self._jobs[key.place].version, *(kept.since for kept in self._children(key))

    def _has(self, key: Key) -> bool:
        return (kept := self._jobs.get(key.place)) is not None and kept.key == key

    def keep_job(self, raw: Object) -> bool:
        """Keep a job as just seen, unless a newer state of it is known. Return whether it was news."""
        key, version = Key.of(raw), version_of(raw)
        old = self._jobs.get(key.place)
        if old is not None and old.version >= version:
            return False
        self._jobs[key.place] = KeptJob.read(raw)
        if old is not None and old.key != key:  # its deletion was not seen, and will not be
            self._job_gone(old.key)
            self._wake(old.key)
        self._job_seen(key, raw)
        return True

    def renew_job(self, raw: Object) -> None:
        """Keep a job as the API server answered, unless its deletion was seen meanwhile."""
        if self._has(Key.of(raw)):
            self.keep_job(raw)

    def drop_job(self, key: Key) -> None:
        """Forget a job that no longer exists; not another one of its name."""
        if self._has(key):
            del self._jobs[key.place]
            self._job_gone(key)

    def job_keys(self) -> list[Key]:
        """Return all jobs."""
        return [kept.key for kept in self._jobs.values()]

    def list_jobs(self, jobs: Iterable[Object]) -> set[Place]:
        """Take in a part of a list of jobs. Return their places."""
        found = set()
        for raw in jobs:
            found.add(place_of(raw))
            if self.keep_job(raw):
                self._wake(Key.of(raw))
        return found

    def end_list_of_jobs(self, namespace: str | None, found: Collection[Place], version: str) -> None:
        """End a consistent list of the jobs of a namespace, or of all: one that it lacks no longer exists."""
        for place, kept in list(self._jobs.items()):
            if place not in found and namespace in (None, place[0]) and kept.version <= int(version):
                self.drop_job(kept.key)
                self._wake(kept.key)

    # Children

    def scope(self, kind: str, namespace: str) -> Scope | None:
        """Return the scope of a kind's objects in a namespace; None if they are not watched."""
        return next((one for one in self.scopes if one.kind == kind and one.covers(namespace)), None)

    def pods(self, key: Key) -> list[tuple[str, ObservedPod]]:
        """Return the pods that carry the job's label, each after the UID that the label says."""
        return [(kept.job_uid, kept.value) for kept in self._children(key) if isinstance(kept.value, ObservedPod)]

    def others(self, key: Key) -> list[tuple[str, Child]]:
        """Return the other objects that carry the job's label, each after the UID of its owner."""
        return [(kept.job_uid, kept.value) for kept in self._children(key) if isinstance(kept.value, Child)]

    def _children(self, key: Key) -> Iterable[Kept]:
        places = self._of_jobs.get((key.namespace, key.name), ())
        return [self._objects[kind][key.namespace, name] for kind, name in sorted(places)]

    def keep(self, raw: Object) -> None:
        """Keep a child as the API server answered a write, unless its watch has shown this version or a later one."""
        scope = self.scope(raw["kind"], place_of(raw)[0])
        if scope is not None and version_of(raw) > scope.version:
            self._put(scope.kind, raw)

    def changed(self, scope: Scope, event: str, raw: Object) -> None:
        """Take in a watch event: ADDED, MODIFIED, DELETED, or BOOKMARK, which only carries a version.

        Raises DisorderError if the event is older than one before and not just a repetition: what happened between them
        is not known.
        """
        version = version_of(raw)
        if event == "BOOKMARK":
            scope.version = max(scope.version, version)
            return
        kept = self._objects[scope.kind].get(place_of(raw))
        if kept is not None and kept.version >= version:
            return
        if version <= scope.version:
            raise DisorderError(f"{event} {place_of(raw)} at version {version} after version {scope.version}")
        scope.version = version
        if event == "DELETED":
            self._remove(scope.kind, raw)
        else:
            self._put(scope.kind, raw)

    def list_part(self, scope: Scope, objects: Iterable[Object]) -> set[Place]:
        """Take in a part of a list of the scope. Return the places of its objects."""
        found = set()
        for raw in objects:
            found.add(place_of(raw))
            self._put(scope.kind, raw)
        return found

    def end_list(self, scope: Scope, found: Collection[Place], version: str) -> None:
        """End a consistent list of the scope: what it lacks was deleted, unless it was written after the list."""
        newest = int(version)
        for place, kept in list(self._objects[scope.kind].items()):
            if place not in found and scope.covers(place[0]) and kept.version <= newest:
                self._forget(scope.kind, place)
        scope.version = newest
        if scope.obstacle is not None:
            scope.obstacle = None
            for key in self.job_keys():  # those that need this kind go on
                self._wake(key)
        self._settle()

    def go_without(self, scope: Scope, obstacle: ObstacleError) -> None:
        """Do not wait for the first list of an optional kind: the API server answers, but does not list it."""
        scope.obstacle = obstacle
        self._settle()

    def _settle(self) -> None:
        if all(one.is_listed or one.obstacle is not None for one in self.scopes):
            self.synced.set()

    def _put(self, kind: str, raw: Object) -> None:
        place = place_of(raw)
        old = self._objects[kind].get(place)
        if old is not None and old.version >= version_of(raw):
            return
        new = Kept.read(kind, raw)
        if old is not None and not old.is_same(new):
            self._forget(kind, place)
            old = None
        changed = old is None or (old.job_uid, old.value) != (new.job_uid, new.value)
        if old is not None and not changed:
            new.value, new.since = old.value, old.since  # the same object, which passes recognise at once
        self._objects[kind][place] = new
        self._of_jobs.setdefault((place[0], new.job), set()).add((kind, place[1]))
        if changed:
            self._wake_job(place[0], new.job)

    def _remove(self, kind: str, raw: Object) -> None:
        """Remove an object of which a watch showed the final state."""
        place, final = place_of(raw), Kept.read(kind, raw)
        if (old := self._objects[kind].get(place)) is not None:
            if not old.is_same(final):
                self._forget(kind, place)
            else:
                del self._objects[kind][place]
                self._unlink(kind, place, old.job)
        self._tell_end(place[0], final)
        self._wake_job(place[0], final.job)

    def _forget(self, kind: str, place: Place) -> None:
        """Remove an object of which the final state is not known."""
        kept = self._objects[kind].pop(place)
        self._unlink(kind, place, kept.job)
        self._tell_end(place[0], kept)
        self._wake_job(place[0], kept.job)

    def _unlink(self, kind: str, place: Place, job: str) -> None:
        linked = self._of_jobs.get((place[0], job), set())
        linked.discard((kind, place[1]))
        if not linked:
            self._of_jobs.pop((place[0], job), None)

    def _tell_end(self, namespace: str, kept: Kept) -> None:
        key = Key(namespace, kept.job, kept.job_uid)
        if isinstance(kept.value, ObservedPod) and self._has(key):
            self._pod_deleted(key, kept.value)

    def _wake_job(self, namespace: str, job: str) -> None:
        """Wake the job of this name that exists now: it may wait until the objects of an earlier one are gone."""
        if (kept := self._jobs.get((namespace, job))) is not None:
            self._wake(kept.key)
