"""Does to jobs what was chosen, in place of users, kubelets and nodes, and notes what must come of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from support.control_plane.operators import ended_container, make_job, outcome
from support.soak.api import PATHS, Api
from support.soak.choice import Action, new_spec, other_shape
from support.soak.differences import UID, Object, Seen, differences, is_ready, owner
from support.soak.expected import EVICTION, FAILURE, NONE, ONE, REPEATED, Blow, Expected
from support.soak.foreign import Foreign

KWOK_SECONDS = 5
"""Seconds in which kwok begins or ends a pod, unless it has given up."""


class Work:
    """The jobs, what is expected of them, and what can be done to them. `note` writes to the soak's log."""

    def __init__(self, api: Api, random: Random, count: int, note: Callable[[str], None], foreign: Foreign) -> None:
        self._api, self._random, self._note, self._foreign = api, random, note, foreign
        self.jobs: dict[str, Expected | None] = {f"job-{number}": None for number in range(count)}
        self.seen: Seen = {}
        self.counts: Counter[str] = Counter()

    @property
    def expected(self) -> dict[str, Expected]:
        """The jobs that exist."""
        return {name: job for name, job in self.jobs.items() if job is not None}

    def look(self) -> dict[str, list[str]]:
        """Read all objects but those of others; return for each job how it differs from what is expected."""
        found = {kind: (self._api("GET", path) or {})["items"] for kind, path in PATHS.items()}
        self.seen = self._foreign.without(found)
        for pod in self.seen["Pod"]:
            if UID in (pod["metadata"].get("labels") or {}):
                self._stand_in_for_kwok(pod)
        differ = {name: differences(job, self.seen, datetime.now(UTC)) for name, job in self.expected.items()}
        statuses = {job["metadata"]["name"]: job.get("status", {}) for job in self.seen["GRPOJob"]}
        for name, job in self.expected.items():
            if not differ[name]:
                self.jobs[name] = job.seen(statuses[name]) if name in statuses else None
        return differ

    def _stand_in_for_kwok(self, pod: Object) -> None:
        """Do what kwok gives up when the API server does not answer: begin and end pods, and report them as ready."""
        meta, now = pod["metadata"], datetime.now(UTC)
        if "deletionTimestamp" in meta:
            asked = datetime.fromisoformat(meta["deletionTimestamp"]).timestamp() - meta["deletionGracePeriodSeconds"]
            if now.timestamp() > asked + KWOK_SECONDS:
                self._remove("Pod", pod, gracePeriodSeconds=0)
            return
        conditions = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        is_old = now.timestamp() > datetime.fromisoformat(meta["creationTimestamp"]).timestamp() + KWOK_SECONDS
        if pod["status"]["phase"] == "Pending" and "nodeName" in pod["spec"] and is_old:
            started = {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}
            self._patch_status(pod, {"status": started})
        elif is_ready(pod, "ContainersReady") and not is_ready(pod):  # its node was late
            self._patch_status(pod, {"status": {"conditions": conditions}})

    def do(self, action: Action, *, at_rest: bool) -> None:
        """Do it."""
        what, name = action
        self._note(f"{what} {name}{'' if at_rest else ', which is not at rest'}")
        self.counts[what] += 1
        getattr(self, f"_{what.replace(' ', '_')}")(name, self.jobs[name], at_rest)

    def _create(self, name: str, _: Expected | None, __: bool) -> None:
        spec = new_spec(self._random)
        made = self._api("POST", PATHS["GRPOJob"], make_job(name, **spec))
        if made is not None:  # else its predecessor is still being deleted
            self._note(f"  {made['metadata']['uid']}: {json.dumps(spec)}")
            job = Expected(name=name, uid=made["metadata"]["uid"], spec=made["spec"], attempts=ONE)
            suspended = replace(job, phases=frozenset({"Suspended"}), attempts=NONE)
            self.jobs[name] = suspended if spec.get("suspend") else job

    def _delete(self, name: str, job: Expected, _: bool, policy: str | None = None) -> None:
        policy = policy or self._random.choice(("Background", "Foreground"))
        options = {"propagationPolicy": policy, "preconditions": {"uid": job.uid}}
        self._api("DELETE", f"{PATHS['GRPOJob']}/{name}", options)
        self.jobs[name] = None

    def _recreate(self, name: str, job: Expected, at_rest: bool) -> None:
        self._delete(name, job, at_rest, "Background")
        self._create(name, None, at_rest)

    def _annotate(self, name: str, *_: Any) -> None:
        annotations = {"example.com/at": str(time.time())}
        self._api.merge(f"{PATHS['GRPOJob']}/{name}", {"metadata": {"annotations": annotations}})

    def _edit(self, name: str, job: Expected, at_rest: bool, **fields: Any) -> None:
        if self._api.merge(f"{PATHS['GRPOJob']}/{name}", {"metadata": {"uid": job.uid}, "spec": fields}) is not None:
            self.jobs[name] = job.edited(at_rest=at_rest, **fields)

    def _suspend(self, name: str, job: Expected, at_rest: bool) -> None:
        self._edit(name, job, at_rest, suspend=True)

    def _resume(self, name: str, job: Expected, at_rest: bool) -> None:
        self._edit(name, job, at_rest, suspend=False)

    def _reshape(self, name: str, job: Expected, at_rest: bool) -> None:
        self._edit(name, job, at_rest, **other_shape(self._random, job))

    def _allow(self, name: str, job: Expected, at_rest: bool) -> None:
        policy = {**job.spec["failurePolicy"], "maxRestarts": job.max_restarts + 1}
        self._edit(name, job, at_rest, failurePolicy=policy)

    def _finish(self, name: str, job: Expected, _: bool) -> None:
        for pod in self._own("Pod", job):
            if pod["metadata"]["name"] in job.trainers:
                self._patch_status(pod, ended_container(0, outcome(0)))
        self.jobs[name] = job.finished()

    def _fail(self, name: str, job: Expected, at_rest: bool) -> None:
        if pod := self._pick("Pod", job):
            reason = "RankFailed" if pod["metadata"]["name"] in job.trainers else "EngineDied"
            self._patch_status(pod, ended_container(70, outcome(70, reason, "no luck")))
            self._hit(job, FAILURE, pod, at_rest)

    def _evict(self, name: str, job: Expected, at_rest: bool) -> None:
        if pod := self._pick("Pod", job):
            meta = {key: pod["metadata"][key] for key in ("name", "namespace")}
            options = {"preconditions": {"uid": pod["metadata"]["uid"]}}
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta, "deleteOptions": options}
            self._api("POST", f"{PATHS['Pod']}/{meta['name']}/eviction", eviction)
            self._hit(job, EVICTION, pod, at_rest)

    def _kill(self, name: str, job: Expected, at_rest: bool) -> None:
        if pod := self._pick("Pod", job):
            self._remove("Pod", pod, gracePeriodSeconds=0)
            self._hit(job, FAILURE, pod, at_rest)

    def _delete_child(self, name: str, job: Expected, _: bool) -> None:
        kind = self._random.choice(("Service", "ConfigMap", "NetworkPolicy"))
        if child := self._pick(kind, job):
            self._remove(kind, child)

    def _edit_service(self, name: str, *_: Any) -> None:
        self._api.merge(f"{PATHS['Service']}/{name}", {"spec": {"publishNotReadyAddresses": False}})

    def _scale_down(self, name: str, job: Expected, at_rest: bool) -> None:
        if one := self._pick("StatefulSet", job):
            self._scale(one, 0)
            self._lose_pods(job, one, at_rest)

    def _scale_up(self, name: str, job: Expected, _: bool) -> None:
        if one := self._pick("StatefulSet", job):
            self._scale(one, one["spec"]["replicas"] + 1)

    def _delete_set(self, name: str, job: Expected, at_rest: bool) -> None:
        if one := self._pick("StatefulSet", job):
            self._remove("StatefulSet", one)
            self._lose_pods(job, one, at_rest)

    def _lose_pods(self, job: Expected, owner: Object, at_rest: bool) -> None:
        """Delete the pods of a StatefulSet, as its controller may or may not before the operator repairs it."""
        blow = FAILURE
        for pod in self._own("Pod", job):
            if any(ref["uid"] == owner["metadata"]["uid"] for ref in pod["metadata"].get("ownerReferences", ())):
                self._remove("Pod", pod, gracePeriodSeconds=0)
                self._hit(self.jobs[job.name], blow, pod, at_rest)
                blow = REPEATED

    def _hit(self, job: Expected, blow: Blow, pod: Object, at_rest: bool) -> None:
        engine = job.replaces_engines and pod["metadata"]["name"] not in job.trainers
        self._note(f"  {pod['metadata']['name']} {pod['metadata']['uid']}")
        self.jobs[job.name] = job.hit(Blow(blow.restarts, blow.counts, engine), at_rest=at_rest)

    def _own(self, kind: str, job: Expected) -> list[Object]:
        return [one for one in self.seen[kind] if owner(one) == job.uid and "deletionTimestamp" not in one["metadata"]]

    def _pick(self, kind: str, job: Expected) -> Object | None:
        own = self._own(kind, job)
        return self._random.choice(own) if own else None

    def _remove(self, kind: str, one: Object, **options: Any) -> None:
        options |= {"preconditions": {"uid": one["metadata"]["uid"]}, "propagationPolicy": "Background"}
        self._api("DELETE", f"{PATHS[kind]}/{one['metadata']['name']}", options)

    def _scale(self, one: Object, replicas: int) -> None:
        self._note(f"  {one['metadata']['name']} to {replicas}")
        body = {"metadata": {"uid": one["metadata"]["uid"]}, "spec": {"replicas": replicas}}
        self._api.merge(f"{PATHS['StatefulSet']}/{one['metadata']['name']}", body)

    def _patch_status(self, pod: Object, patch: Object) -> None:
        path = f"{PATHS['Pod']}/{pod['metadata']['name']}/status"
        self._api("PATCH", path, {"metadata": {"uid": pod["metadata"]["uid"]}, **patch}, "strategic-merge-patch+json")
