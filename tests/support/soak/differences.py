"""Differences between a job with its objects and the expectation. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from support.soak.expected import ENDED, Count, Expected

Object = dict[str, Any]
Seen = Mapping[str, list[Object]]
"""Objects of the namespace by kind, as read at about the same time."""

MANAGED = "app.kubernetes.io/managed-by"
JOB, UID, ATTEMPT = (f"training.grpo.dev/{label}" for label in ("job", "job-uid", "attempt"))
KINDS = ("Pod", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy")
LATE_SECONDS = 15
"""Seconds that a deadline may have passed: a pass comes every 10 s, and the API server may be busy."""


def differences(expected: Expected, seen: Seen, now: datetime) -> list[str]:
    """Return what is not as it must be once the job is at rest; nothing if it is at rest as expected."""
    job = next((one for one in seen["GRPOJob"] if one["metadata"]["name"] == expected.name), None)
    if job is None:
        has_ended = expected.phases & ENDED or "activeDeadlineSeconds" in expected.spec
        return [] if has_ended and "ttlSecondsAfterFinished" in expected.spec else ["the job is gone"]
    if job["metadata"]["uid"] != expected.uid:
        return ["the job is another one"]
    status = job.get("status", {})
    own = {kind: [one for one in seen[kind] if owner(one) == expected.uid] for kind in KINDS}
    return [
        *_of_status(expected, job, status, now),
        *(_running(expected, status, own) if status.get("phase") == "Running" else _stopped(own)),
    ]


def leftovers(jobs: Mapping[str, Expected], seen: Seen) -> list[str]:
    """Return the jobs' objects that no job of the model owns."""
    uids = {job.uid for job in jobs.values()}
    jobs_left = [f"GRPOJob {one['metadata']['name']}" for one in seen["GRPOJob"] if one["metadata"]["uid"] not in uids]
    return jobs_left + sorted(
        f"{kind} {one['metadata']['name']} of a job that is gone"
        for kind in KINDS
        for one in seen[kind]
        # Garbage collection may miss what others took the labels from: a job that needs the name deletes it, and a
        # StatefulSet is found by its pods.
        if _is_managed(one) and owner(one) not in uids and (kind == "Pod" or _is_labelled(one))
    )


def versions(job: str, seen: Seen) -> tuple[str, frozenset[str]]:
    """Return the version of a job that exists, and those of its objects."""
    raw = next(one for one in seen["GRPOJob"] if one["metadata"]["name"] == job)
    own = (one for kind in KINDS for one in seen[kind] if owner(one) == raw["metadata"]["uid"])
    return raw["metadata"]["resourceVersion"], frozenset(one["metadata"]["resourceVersion"] for one in own)


def _of_status(expected: Expected, job: Object, status: Object, now: datetime) -> Iterator[str]:
    if status.get("observedGeneration") != job["metadata"]["generation"]:
        yield "the status is of an older generation"
    phase, last = status.get("phase"), status.get("lastFailure", {}).get("reason")
    deadline = expected.spec.get("activeDeadlineSeconds")
    if deadline is not None and phase == "Failed" and last == "DeadlineExceeded":
        pass
    elif phase not in expected.phases:
        yield f"phase {phase}, not {'/'.join(sorted(expected.phases))}"
    elif deadline is not None and phase not in ENDED and _active_seconds(status, now) > deadline + LATE_SECONDS:
        yield f"active for longer than its deadline of {deadline} s"
    if phase == "Suspended" and not is_true(status, "Suspended"):  # until the operator has seen the last pod go
        yield "it is still being suspended"
    if phase in ENDED and "ttlSecondsAfterFinished" in expected.spec:
        yield "not deleted after its time to live"
    if is_true(status, "Blocked"):
        yield "blocked"
    restarts = status.get("restarts", {})
    yield from _out_of("restarts", expected.restarts, restarts.get("total", 0), phase)
    yield from _out_of("counted restarts", expected.counted, restarts.get("counted", 0), phase)
    yield from _out_of("attempts", expected.attempts, status.get("attempt", -1) + 1, phase)


def _out_of(what: str, count: Count, value: int, phase: str | None) -> Iterator[str]:
    least = count.known if phase == "Failed" else count.least  # a deadline may come before a restart
    if not least <= value <= count.most:
        yield f"{value} {what}, not {least} to {count.most}"


def _running(expected: Expected, status: Object, own: dict[str, list[Object]]) -> Iterator[str]:
    name, attempt = expected.name, str(status["attempt"])
    wanted = {
        "StatefulSet": {f"{name}-{group}" for group in expected.groups},
        "Service": {name},
        "NetworkPolicy": {name, f"{name}.engines"} if expected.has_engines else {name},
        "ConfigMap": {f"{name}-{attempt}"},
        "Pod": expected.pods,
    }
    for kind, names in wanted.items():
        there = {one["metadata"]["name"] for one in own[kind]}
        nameless = {one["metadata"]["name"] for one in own[kind] if _labels(one).get(JOB) != name}
        if nameless & names:
            yield f"{kind}s {sorted(nameless & names)} have not the job's labels"
        if kind != "Pod":  # what labels do not find of an earlier attempt or shape holds nothing, and goes with the job
            there -= nameless - names
        if there != names:
            yield f"{kind}s {sorted(there)}, not {sorted(names)}"
    for one in own["StatefulSet"]:
        if _labels(one).get(JOB) != name and not one["spec"]["replicas"]:
            continue
        group = one["metadata"]["name"].removeprefix(f"{name}-")
        if one["spec"]["replicas"] != expected.groups.get(group) or _labels(one).get(ATTEMPT) != attempt:
            yield f"StatefulSet {one['metadata']['name']} is not the attempt's"
    if not all(one["spec"].get("publishNotReadyAddresses") for one in own["Service"]):
        yield "the Service is not as applied"
    recorded = {member["pod"]: member["uid"] for member in status.get("members", ())}
    for pod in own["Pod"]:
        meta = pod["metadata"]
        if meta["labels"][ATTEMPT] != attempt or "deletionTimestamp" in meta or not is_ready(pod):
            yield f"pod {meta['name']} is not a ready one of attempt {attempt}"
        if recorded.get(meta["name"]) != meta["uid"]:
            yield f"pod {meta['name']} is not the recorded one"


def _stopped(own: dict[str, list[Object]]) -> Iterator[str]:
    if own["Pod"]:
        yield f"pods are left: {sorted(pod['metadata']['name'] for pod in own['Pod'])}"
    for one in own["StatefulSet"]:
        if one["spec"]["replicas"]:
            yield f"StatefulSet {one['metadata']['name']} wants pods"


def is_ready(pod: Object, kind: str = "Ready") -> bool:
    """Whether a condition of the pod is True."""
    return is_true(pod.get("status", {}), kind)


def is_true(status: Object, kind: str) -> bool:
    """Whether a condition of a status is True."""
    return any(c["type"] == kind and c["status"] == "True" for c in status.get("conditions", ()))


def controller(one: Object) -> str:
    """Return the UID of an object's controller, "" if it has none."""
    references = one["metadata"].get("ownerReferences", ())
    return next((reference["uid"] for reference in references if reference.get("controller")), "")


def owner(one: Object) -> str:
    """Return the UID of the job that owns an object which is not of others. They may change all labels but a pod's."""
    label: str = _labels(one).get(UID, "")
    return label if _is_of_a_set(one) else controller(one) or label


def _is_of_a_set(one: Object) -> bool:
    return any(reference["kind"] == "StatefulSet" for reference in one["metadata"].get("ownerReferences", ()))


def _is_managed(one: Object) -> bool:
    owners = one["metadata"].get("ownerReferences", ())
    return any(map(_is_a_job, owners)) or _labels(one).get(MANAGED) == "grpo-operator"


def _is_labelled(one: Object) -> bool:
    owners = [reference["name"] for reference in one["metadata"].get("ownerReferences", ()) if _is_a_job(reference)]
    return not owners or _labels(one).get(JOB) in owners


def _is_a_job(reference: Object) -> bool:
    return bool(reference["kind"] == "GRPOJob")


def _labels(one: Object) -> dict[str, str]:
    labels: dict[str, str] = one["metadata"].get("labels") or {}
    return labels


def _active_seconds(status: Object, now: datetime) -> float:
    since = status.get("activeSince")
    running = (now - datetime.fromisoformat(since)).total_seconds() if since else 0.0
    return float(status.get("activeSeconds", 0)) + running
