"""Acts of others beside the jobs: objects with the jobs' labels and names, and hands on the jobs' own objects.

The operator must leave all that is theirs as it is, and come to rest once they stand in nobody's way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from grpo_operator.api import names
from support.control_plane.operators import ended_container, outcome
from support.soak.api import PATHS, Api
from support.soak.differences import JOB, KINDS, MANAGED, UID, Object, Seen, controller
from support.soak.expected import Expected

MOST = 24
"""Objects of others at a time."""

HOLD = "example.com/hold"
"""A finalizer that others put on a job's own object."""

PATIENT_SECONDS = 15.0
"""Seconds that others stand in the way at most. What waits for a pod's name asks ever more rarely."""

ACTS = {"create beside": 6, "stand in the way": 3, "relabel theirs": 2, "delete theirs": 2, "fail theirs": 2}
ACTS |= {"strip": 2, "mislabel": 2, "hold": 2}


class Foreign:
    """Random acts of others. `note` writes to the soak's log; `deleted` says whether the operator has deleted an object
    of a kind and name since a time.

    Theirs are known by UID: each as it was when they last wrote it, which is how it must stay.
    """

    def __init__(
        self, api: Api, random: Random, note: Callable[[str], None], deleted: Callable[[str, str, str], bool]
    ) -> None:
        self._api, self._random, self._note, self._deleted = api, random, note, deleted
        self._theirs: dict[str, tuple[str, Object]] = {}  # UID: kind, object
        self._until: dict[str, float] = {}  # UID of what stands in the way: when it goes
        self._held: dict[tuple[str, str], float] = {}  # kind and name of jobs' objects: when their finalizer goes
        self._sets: set[str] = set()  # UIDs of all StatefulSets that were ever theirs
        self._number = 0
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> set[str]:
        """The names of what is theirs."""
        return {one["metadata"]["name"] for _, one in self._theirs.values()}

    def act(self, jobs: Mapping[str, Expected | None], seen: Seen) -> None:
        """Do something to a job that may not exist, or to what is theirs. `seen`: the jobs' own objects."""
        what = self._random.choices(list(ACTS), list(ACTS.values()))[0]
        name = self._random.choice(sorted(jobs))
        own = {kind: [one for one in seen[kind] if names_job(one) == name] for kind in KINDS}
        if getattr(self, f"_{what.replace(' ', '_')}")(name, jobs[name], own):
            self.counts[what] += 1

    def tend(self, *, all_of_it: bool = False) -> None:
        """Take away what stood in the way for long enough, or all of it; so with finalizers."""
        now = time.monotonic()
        for uid in [uid for uid, until in self._until.items() if all_of_it or until < now]:
            self._remove(uid)
        for kind, name in [held for held, until in self._held.items() if all_of_it or until < now]:
            del self._held[kind, name]
            self._release(f"{PATHS[kind]}/{name}")

    def _release(self, path: str) -> None:
        """Take the finalizer away, whoever writes the object meanwhile."""
        while live := self._api("GET", path):
            meta = live["metadata"]
            if HOLD not in (finalizers := meta.get("finalizers", [])):
                return
            left = [one for one in finalizers if one != HOLD]
            if self._api.merge(path, {"metadata": {"resourceVersion": meta["resourceVersion"], "finalizers": left}}):
                return

    def without(self, seen: Seen) -> Seen:
        """Return what is not theirs. Raises AssertionError if something of theirs changed or is gone."""
        live = {one["metadata"]["uid"]: one for kind in KINDS for one in seen[kind]}
        for uid, (kind, before) in list(self._theirs.items()):
            name, since = before["metadata"]["name"], before["metadata"]["creationTimestamp"]
            if uid not in live and kind == "Pod" and uid in self._until and not self._deleted(kind, name, since):
                # The StatefulSet's controller deletes by name what it takes for its own pod, which has just gone.
                self._forget(uid)
                continue
            assert uid in live, f"{kind} {name}, which is of another, is gone"
            assert _kept(live[uid]) == _kept(before), f"{kind} {name}, which is of another, was changed: {live[uid]}"
            writers = {entry["manager"] for entry in live[uid]["metadata"].get("managedFields", ())}
            assert names.MANAGER not in writers, f"the operator wrote {kind} {name}, which is of another"

        def is_theirs(one: Object) -> bool:
            return one["metadata"]["uid"] in self._theirs or controller(one) in self._sets

        return {kind: [one for one in found if not is_theirs(one)] for kind, found in seen.items()}

    def _create_beside(self, name: str, _: Expected | None, own: Mapping[str, list[Object]]) -> bool:
        if len(self._theirs) >= MOST:
            return False
        self._number += 1
        kind = self._random.choice(KINDS)
        # A pod of this name and these labels is no member of a StatefulSet of the job, whose controller would adopt it.
        made = self._make(kind, f"{name}-theirs-{self._number}x", self._labels(name, own[kind]))
        return made is not None

    def _stand_in_the_way(self, name: str, job: Expected | None, _: Mapping[str, list[Object]]) -> bool:
        groups = sorted(job.groups) if job else ["a", "b", "gen"]
        attempts = range((job.attempts.most if job else 0) + 2)
        taken = {
            "Pod": [f"{name}-{group}-0" for group in groups],
            "StatefulSet": [f"{name}-{group}" for group in groups],
            "Service": [name],
            "ConfigMap": [f"{name}-{attempt}" for attempt in attempts],
            "NetworkPolicy": [name, f"{name}.engines"],
        }
        kind = self._random.choice(KINDS)
        labels = {} if kind == "Pod" or self._random.random() < 0.5 else self._labels(name, [])
        # Of a StatefulSet that is replaced while watches expire, garbage collection may keep the pods.
        made = self._make(kind, self._random.choice(taken[kind]), labels, replicas=0)  # None if the job has it already
        if made is not None:
            self._until[made] = time.monotonic() + self._random.uniform(1, PATIENT_SECONDS)
        return made is not None

    def _labels(self, job: str, own: list[Object]) -> dict[str, str]:
        """Labels of one of the job's own objects, or such as they are."""
        if own and self._random.random() < 0.7:
            return dict(self._random.choice(own)["metadata"].get("labels") or {})
        manager = self._random.choice(("grpo-operator", "another-program"))
        return {JOB: job, UID: "of-nobody", MANAGED: manager, names.LABEL_ATTEMPT: "0"}

    def _make(self, kind: str, name: str, labels: dict[str, str], replicas: int = 1) -> str | None:
        pod = {"containers": [{"name": "main", "image": "any"}]}
        selector = {"theirs": name}
        template = {"metadata": {"labels": labels | selector}, "spec": pod}
        size = {"replicas": replicas, "serviceName": name}
        made: dict[str, Object] = {
            "Pod": {"spec": pod},
            "StatefulSet": {"spec": size | {"selector": {"matchLabels": selector}, "template": template}},
            "Service": {"spec": {"ports": [{"port": 80}], "selector": labels or selector}},
            "ConfigMap": {"data": {"contract.json": "{}"}},
            "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": selector}}},
        }
        live = self._api("POST", PATHS[kind], {"metadata": {"name": name, "labels": labels}, **made[kind]})
        if live is None:
            return None
        uid: str = live["metadata"]["uid"]
        self._note(f"  of others: {kind} {name} {uid} {labels}")
        self._theirs[uid] = kind, live
        if kind == "StatefulSet":
            self._sets.add(uid)
        return uid

    def _relabel_theirs(self, name: str, _: Expected | None, own: Mapping[str, list[Object]]) -> bool:
        if (uid := self._pick(self._theirs.keys() - self._until.keys())) is None:
            return False
        kind, one = self._theirs[uid]
        labels = self._labels(name, own[kind])
        path = f"{PATHS[kind]}/{one['metadata']['name']}"
        live = self._api.merge(path, {"metadata": {"uid": uid, "labels": labels}})
        assert live is not None, f"{kind} {one['metadata']['name']}, which is of another, is gone"
        self._theirs[uid] = kind, live
        return True

    def _delete_theirs(self, *_: Any) -> bool:
        if (uid := self._pick(self._theirs)) is None:
            return False
        self._remove(uid)
        return True

    def _fail_theirs(self, *_: Any) -> bool:
        if (uid := self._pick(uid for uid, (kind, _) in self._theirs.items() if kind == "Pod")) is None:
            return False
        patch = {"metadata": {"uid": uid}, **ended_container(70, outcome(70, "RankFailed", "theirs"))}
        path = f"{PATHS['Pod']}/{self._theirs[uid][1]['metadata']['name']}/status"
        self._api("PATCH", path, patch, "strategic-merge-patch+json")
        return True

    def _strip(self, _: str, __: Expected | None, own: Mapping[str, list[Object]]) -> bool:
        """Take the labels off one of the job's objects. A pod without them is no longer its StatefulSet's."""
        return self._write_own(own, lambda one: {"labels": dict.fromkeys(one["metadata"].get("labels") or {})})

    def _mislabel(self, name: str, _: Expected | None, own: Mapping[str, list[Object]]) -> bool:
        return self._write_own(own, lambda one: {"labels": {JOB: f"{name}x", UID: "of-nobody"}})

    def _hold(self, _: str, __: Expected | None, own: Mapping[str, list[Object]]) -> bool:
        def hold(one: Object) -> Object:
            until = time.monotonic() + self._random.uniform(1, PATIENT_SECONDS)
            self._held[one["kind"], one["metadata"]["name"]] = until
            return {"finalizers": [*one["metadata"].get("finalizers", ()), HOLD]}

        return self._write_own(own, hold)

    def _write_own(self, own: Mapping[str, list[Object]], metadata: Callable[[Object], Object]) -> bool:
        kinds = [kind for kind in KINDS if kind != "Pod" and own[kind]]
        if not kinds:
            return False
        kind = self._random.choice(kinds)
        one = self._random.choice(own[kind])
        if "deletionTimestamp" in one["metadata"]:  # then nobody may add a finalizer
            return False
        body = {"metadata": {"uid": one["metadata"]["uid"], **metadata({"kind": kind, **one})}}
        path = f"{PATHS[kind]}/{one['metadata']['name']}"
        self._note(f"  others write {kind} {one['metadata']['name']}: {body}")
        try:
            return self._api.merge(path, body) is not None
        except RuntimeError:
            live = self._api("GET", path)
            if live is None or "deletionTimestamp" in live["metadata"]:  # since it was read
                return False
            raise

    def _pick(self, uids: Iterable[str]) -> str | None:
        found = sorted(uids)
        return self._random.choice(found) if found else None

    def _forget(self, uid: str) -> tuple[str, Object]:
        self._until.pop(uid, None)
        return self._theirs.pop(uid)

    def _remove(self, uid: str) -> None:
        kind, one = self._forget(uid)
        self._note(f"  others delete {kind} {one['metadata']['name']}")
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background", "preconditions": {"uid": uid}}
        gone = self._api("DELETE", f"{PATHS[kind]}/{one['metadata']['name']}", options)
        if gone is None:
            name, since = one["metadata"]["name"], one["metadata"]["creationTimestamp"]
            is_by_name = kind == "Pod" and not self._deleted(kind, name, since)
            assert is_by_name, f"{kind} {name}, which is of another, was already gone"


def names_job(one: Object) -> str:
    """Return the name of the job that an object's controller is, or that its label names."""
    labels: Mapping[str, str] = one["metadata"].get("labels") or {}
    owners = (ref["name"] for ref in one["metadata"].get("ownerReferences", ()) if ref.get("kind") == "GRPOJob")
    return next(owners, labels.get(JOB, ""))


def _kept(one: Object) -> Object:
    """Return what nobody but its owner may change: not what controllers, the scheduler and kubelets write."""
    meta = one["metadata"]
    kept = ("name", "uid", "labels", "annotations", "ownerReferences", "finalizers", "deletionTimestamp")
    spec = {name: value for name, value in one.get("spec", {}).items() if name != "nodeName"}
    return {"spec": spec, "data": one.get("data"), **{name: meta.get(name) for name in kept}}
