"""A copy of jobs and their children, kept by watches, from which passes plan without asking the API server.

It may be behind the API server at any time. So it never decides: a pass that would change the course of a job looks
again, live (see `changes_course` in decide/second_look.py), and no child is changed without a live read or a write of
its job in the same pass.

Objects carry resourceVersions, which grow with every change and can be compared within one kind (KEP-5504). So events
that come late, twice, or after the answer to the operator's own write are recognised and change nothing.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.decide.objects import labelled_job, owner_of
from grpo_operator.decide.observe import Child, read_child
from grpo_operator.decide.observed_pod import ObservedPod, read_pod
from grpo_operator.runtime.errors import ObstacleError
from grpo_operator.runtime.scopes import Scope
from grpo_spec.lenient import mapping, text

Object = Mapping[str, Any]
Place = tuple[str, str]
"""Namespace and name."""
Versions = tuple[int, ...]
"""Equal only while a job is, and what decisions need of its children: versions grow with every change, and none comes
twice.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A job by its UID: a job recreated under the same name is another job."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class DisorderError(Exception):
    """A watch sends events out of order: list again."""


@dataclass(slots=True)
class _Kept:
    """An object: its version, the name of its job by its label, the UID of its job (of a pod by its label, else of its
    owner), what decisions need of it, and the version that first showed that: others change their status all the time.
    """

    version: int
    job: str
    job_uid: str
    value: ObservedPod | Child
    since: int

    def is_same(self, other: _Kept) -> bool:
        """Whether both are states of one object, under one job's name."""
        return (self.job, self.value.uid) == (other.job, other.value.uid)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job: its version, which one it is, and the object, as bytes (`Child.packed` says why)."""

    version: int
    key: Key
    pickled: bytes  # not marshalled as children are: a user's fields may be nested deeper than that follows


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
        self._objects: dict[str, dict[Place, _Kept]] = {scope.kind: {} for scope in self.scopes}
        self._of_jobs: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self._jobs: dict[Place, _Job] = {}

    def count(self) -> dict[str, int]:
        """Return the number of objects of each kind."""
        return {names.KIND: len(self._jobs)} | {kind: len(kept) for kind, kept in self._objects.items()}

    # Jobs

    def job(self, key: Key) -> dict[str, Any] | None:
        """Return a job as last seen, or None."""
        return pickle.loads(self._jobs[_where(key)].pickled) if self._has(key) else None

    def versions(self, key: Key) -> Versions | None:
        """Return the versions of a job and of what decisions need of the children that carry its label; None if the job
        does not exist.
        """
        if not self._has(key):
            return None
        return self._jobs[_where(key)].version, *(kept.since for kept in self._children(key))

    def _has(self, key: Key) -> bool:
        return (kept := self._jobs.get(_where(key))) is not None and kept.key == key

    def keep_job(self, raw: Object) -> bool:
        """Keep a job as just seen, unless a newer state of it is known. Return whether it was news."""
        key, version = _key(raw), _version(raw)
        old = self._jobs.get(_where(key))
        if old is not None and old.version >= version:
            return False
        self._jobs[_where(key)] = _Job(version, key, pickle.dumps(_trimmed(raw)))
        if old is not None and old.key != key:  # its deletion was not seen, and will not be
            self._job_gone(old.key)
            self._wake(old.key)
        self._job_seen(key, raw)
        return True

    def renew_job(self, raw: Object) -> None:
        """Keep a job as the API server answered, unless its deletion was seen meanwhile."""
        if self._has(_key(raw)):
            self.keep_job(raw)

    def drop_job(self, key: Key) -> None:
        """Forget a job that no longer exists; not another one of its name."""
        if self._has(key):
            del self._jobs[_where(key)]
            self._job_gone(key)

    def job_keys(self) -> list[Key]:
        """Return all jobs."""
        return [kept.key for kept in self._jobs.values()]

    def list_jobs(self, jobs: Iterable[Object]) -> set[Place]:
        """Take in a part of a list of jobs. Return their places."""
        found = set()
        for raw in jobs:
            found.add(_place(raw))
            if self.keep_job(raw):
                self._wake(_key(raw))
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

    def _children(self, key: Key) -> Iterable[_Kept]:
        places = self._of_jobs.get((key.namespace, key.name), ())
        return [self._objects[kind][key.namespace, name] for kind, name in sorted(places)]

    def keep(self, raw: Object) -> None:
        """Keep a child as the API server answered a write, unless its watch has shown this version or a later one."""
        scope = self.scope(raw["kind"], _place(raw)[0])
        if scope is not None and _version(raw) > scope.version:
            self._put(scope.kind, raw)

    def changed(self, scope: Scope, event: str, raw: Object) -> None:
        """Take in a watch event: ADDED, MODIFIED, DELETED, or BOOKMARK, which only carries a version.

        Raises DisorderError if the event is older than one before and not just a repetition: what happened between them
        is not known.
        """
        version = _version(raw)
        if event == "BOOKMARK":
            scope.version = max(scope.version, version)
            return
        kept = self._objects[scope.kind].get(_place(raw))
        if kept is not None and kept.version >= version:
            return
        if version <= scope.version:
            raise DisorderError(f"{event} {_place(raw)} at version {version} after version {scope.version}")
        scope.version = version
        if event == "DELETED":
            self._remove(scope.kind, raw)
        else:
            self._put(scope.kind, raw)

    def list_part(self, scope: Scope, objects: Iterable[Object]) -> set[Place]:
        """Take in a part of a list of the scope. Return the places of its objects."""
        found = set()
        for raw in objects:
            found.add(_place(raw))
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
        place = _place(raw)
        old = self._objects[kind].get(place)
        if old is not None and old.version >= _version(raw):
            return
        new = _read(kind, raw)
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
        place, final = _place(raw), _read(kind, raw)
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

    def _tell_end(self, namespace: str, kept: _Kept) -> None:
        key = Key(namespace, kept.job, kept.job_uid)
        if isinstance(kept.value, ObservedPod) and self._has(key):
            self._pod_deleted(key, kept.value)

    def _wake_job(self, namespace: str, job: str) -> None:
        """Wake the job of this name that exists now: it may wait until the objects of an earlier one are gone."""
        if (kept := self._jobs.get((namespace, job))) is not None:
            self._wake(kept.key)


def _read(kind: str, raw: Object) -> _Kept:
    job, version = text(mapping(raw["metadata"].get("labels")).get(names.LABEL_JOB)), _version(raw)
    if kind == "Pod":
        return _Kept(version, job, labelled_job(raw), read_pod(raw), since=version)
    return _Kept(version, job, owner_of(raw), read_child(kind, raw), since=version)


def _key(job: Object) -> Key:
    return Key(*_place(job), job["metadata"]["uid"])


def _where(key: Key) -> Place:
    return key.namespace, key.name


def _version(raw: Object) -> int:
    return int(raw["metadata"]["resourceVersion"])


def _place(raw: Object) -> Place:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def _trimmed(raw: Object) -> dict[str, Any]:
    metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    return {**raw, "metadata": metadata}
