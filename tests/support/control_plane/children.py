"""Plain children of jobs, as an API server has them, for tests of the mirror."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.decide.objects import labelled_job, owner_of
from grpo_operator.decide.observe import Child, read_child
from grpo_operator.decide.observed_pod import ObservedPod, read_pod
from grpo_operator.runtime.kept import Key
from support.control_plane.memory_store import Change, Object, Selection, Store

MANAGED = ((names.LABEL_MANAGED_BY, names.MANAGER),)


def child(kind: str, namespace: str, name: str, *, job: str, uid: str, mark: int, is_managed: bool = True) -> Object:
    """Return a child of the job with this name and UID. `mark` is what tells one state of it from another."""
    labels = {names.LABEL_JOB: job, names.LABEL_JOB_UID: uid} | ({} if not is_managed else dict(MANAGED))
    content: dict[str, Any] = {"data": {"mark": str(mark)}}
    if kind == "Pod":
        content = {"spec": {}, "status": {"podIP": f"mark-{mark}"}}
    elif kind == "StatefulSet":
        content = {"spec": {"replicas": mark}, "status": {"readyReplicas": 0}}
    metadata: dict[str, Any] = {"namespace": namespace, "name": name, "labels": labels}
    if kind != "Pod":
        metadata["ownerReferences"] = [{"kind": names.KIND, "name": job, "uid": uid, "controller": True}]
    return {"apiVersion": names.api_version(kind), "kind": kind, "metadata": metadata, **content}


def mark(value: ObservedPod | Child) -> int:
    """Return the mark of a child as the mirror shows it."""
    if isinstance(value, ObservedPod):
        return int((value.ip or "").removeprefix("mark-"))
    return int(value.raw["data"]["mark"] if "data" in value.raw else value.raw["spec"]["replicas"])


def truth(store: Store, kind: str, namespace: str, job: str) -> list[tuple[str, ObservedPod | Child]]:
    """Return what a mirror that lacks nothing shows of a job: its children of a kind, each after the UID of its job."""
    selection = Selection(kind, namespace, (*MANAGED, (names.LABEL_JOB, job)))
    return [(job_of(raw), read(raw)) for raw in store.select(selection)]


def job_of(raw: Object) -> str:
    """Return the UID of the job of a child: of a pod as its label says, for in these tests nobody copies labels."""
    return labelled_job(raw) if raw["kind"] == "Pod" else owner_of(raw)


def read(raw: Object) -> ObservedPod | Child:
    """Return a child as the mirror shows it."""
    return read_pod(raw) if raw["kind"] == "Pod" else read_child(raw["kind"], raw)


def end(change: Change) -> tuple[Key, ObservedPod] | None:
    """Return the job and the last state of a pod that this change takes away from it, by deletion or another label."""
    before = change.before
    if change.kind != "Pod" or before is None or not Selection("Pod", None, MANAGED).has(before):
        return None
    namespace, labels = before["metadata"]["namespace"], before["metadata"]["labels"]
    if Selection("Pod", None, (*MANAGED, (names.LABEL_JOB, labels[names.LABEL_JOB]))).has(change.after):
        return None
    return Key(namespace, labels[names.LABEL_JOB], labels[names.LABEL_JOB_UID]), read_pod(before)


def bare_job(namespace: str, name: str, uid: str, version: int) -> Object:
    """Return as much of a job as the mirror needs."""
    return {"metadata": {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}}
