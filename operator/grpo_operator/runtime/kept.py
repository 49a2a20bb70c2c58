"""The shape in which the mirror keeps jobs and their children: what decisions need of them, under their keys."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.decide.objects import labelled_job, owner_of
from grpo_operator.decide.observe import Child, read_child
from grpo_operator.decide.observed_pod import ObservedPod, read_pod
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

    @classmethod
    def of(cls, job: Object) -> Key:
        """Return the key of a job."""
        return cls(*place_of(job), job["metadata"]["uid"])

    @property
    def place(self) -> Place:
        """The place of the job, which may be another job's later."""
        return self.namespace, self.name


@dataclass(slots=True)
class Kept:
    """An object: its version, the name of its job by its label, the UID of its job (of a pod by its label, else of its
    owner), what decisions need of it, and the version that first showed that: others change their status all the time.
    """

    version: int
    job: str
    job_uid: str
    value: ObservedPod | Child
    since: int

    @classmethod
    def read(cls, kind: str, raw: Object) -> Kept:
        """Keep what decisions need of a child."""
        job, version = text(mapping(raw["metadata"].get("labels")).get(names.LABEL_JOB)), version_of(raw)
        if kind == "Pod":
            return cls(version, job, labelled_job(raw), read_pod(raw), since=version)
        return cls(version, job, owner_of(raw), read_child(kind, raw), since=version)

    def is_same(self, other: Kept) -> bool:
        """Whether both are states of one object, under one job's name."""
        return (self.job, self.value.uid) == (other.job, other.value.uid)


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job: its version, which one it is, and the object, as bytes (`Child.packed` says why)."""

    version: int
    key: Key
    pickled: bytes  # not marshalled as children are: a user's fields may be nested deeper than that follows

    @classmethod
    def read(cls, raw: Object) -> KeptJob:
        """Keep a job without `managedFields`, which nothing reads."""
        metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
        return cls(version_of(raw), Key.of(raw), pickle.dumps({**raw, "metadata": metadata}))

    @property
    def raw(self) -> dict[str, Any]:
        """The job as a dictionary of one's own."""
        whole: dict[str, Any] = pickle.loads(self.pickled)
        return whole


def version_of(raw: Object) -> int:
    """Return the version of an object."""
    return int(raw["metadata"]["resourceVersion"])


def place_of(raw: Object) -> Place:
    """Return the place of an object."""
    return raw["metadata"]["namespace"], raw["metadata"]["name"]
