"""Reduce a job's children, as the API server returns them, to what decisions need. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from grpo_operator.api import names
from grpo_operator.api.status import Disruption, MemberOutcome, known_time
from grpo_workload.spec import lenient
from grpo_workload.spec.lenient import clip, mapping, mappings, number, text
from grpo_workload.spec.reasons import Reason
from grpo_workload.spec.reports import ExitCode, Outcome, Progress

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """The current state of one pod of the job."""

    name: str
    uid: str
    group: str
    attempt: int
    node: str | None
    ip: str | None
    ready: bool
    unschedulable: str | None  # why the scheduler finds no node
    waiting: str | None  # why the container does not start: "ErrImagePull: ..."
    restarts: int  # number of restarts of its container
    outcome: MemberOutcome | None  # how its launcher ended
    final_progress: Progress | None  # progress in the launcher's result
    deletion_time: str | None  # end of the grace period, if the pod is being deleted
    disruption: Disruption | None  # why the cluster takes the pod away, if it does
    evicted_by_taint: bool = False  # because of its node's taint; Kubernetes taints nodes that are lost
    held_by: str = ""  # what keeps a pod that is being deleted
    downloads: bool = False  # a pod of the Job that downloads, which belongs to no attempt
    controller: str = ""  # UID of the StatefulSet that deletes it when the time comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child object other than a pod."""

    kind: str
    name: str
    uid: str
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The state of a job's children at one moment."""

    pods: Mapping[str, ObservedPod]
    """Existing pods, by name."""

    downloaders: tuple[ObservedPod, ...] = ()
    """Pods of the Job that downloads."""

    gone: Mapping[str, ObservedPod] = field(default_factory=dict)
    """The final state of pods just deleted, by UID."""

    children: tuple[Child, ...] = ()
    """All other children."""

    foreign: tuple[str, ...] = ()
    """Objects that an earlier job of the same name left behind: kind/name."""

    abandoned: tuple[tuple[str, str, str], ...] = ()
    """Those of them whose owner no longer exists and that nobody is deleting: kind, name and UID."""

    lost_nodes: Mapping[str, str] = field(default_factory=dict)
    """Since when a node is not ready, by its name; only nodes that were read."""

    absent_nodes: frozenset[str] = frozenset()
    """The lost nodes that no longer exist."""

    ready_nodes: frozenset[str] = frozenset()
    """Nodes that were read and are not lost."""

    has_queues: bool = False
    """Whether the cluster has Kueue, so that a Workload that is not among the children does not exist."""


_KEPT_METADATA = ("name", "namespace", "uid", "labels", "annotations", "ownerReferences", "deletionTimestamp")


def observe(
    uid: str,
    *,
    pods: Iterable[tuple[str, ObservedPod]],
    others: Iterable[tuple[str, Child]] = (),
    gone: Iterable[ObservedPod] = (),
) -> Observed:
    """Sort objects that carry the job's label into those of the job with this UID and those of an earlier job of the
    same name.

    Each object comes after the UID of its job. `gone`: the final state of the job's pods that were just deleted.
    """
    pods, others = list(pods), list(others)
    strangers = [pod for owner, pod in pods if owner != uid]
    foreign = [child for owner, child in others if owner != uid]
    sets = {child.uid for _, child in others if child.kind == "StatefulSet"}
    return Observed(
        pods={pod.name: pod for owner, pod in pods if owner == uid and not pod.downloads},
        downloaders=tuple(pod for owner, pod in pods if owner == uid and pod.downloads),
        gone={pod.uid: pod for pod in gone if not pod.downloads},
        children=tuple(child for owner, child in others if owner == uid),
        foreign=(
            *(f"pod/{pod.name}" for pod in strangers),
            *(f"{child.kind.lower()}/{child.name}" for child in foreign),
        ),
        abandoned=(
            *(("Pod", pod.name, pod.uid) for pod in strangers if has_no_set(pod, sets)),
            *((child.kind, child.name, child.uid) for child in foreign if _is_abandoned(child, uid)),
        ),
    )


def _is_abandoned(child: Child, uid: str) -> bool:
    """Whether nothing will delete an object of an earlier job, because its owner was replaced by one of the same name.

    Garbage collection takes the two for one object if its watch was interrupted meanwhile, as by a restart of the API
    server. A name has one object at a time, so an owner of the job's name and another UID no longer exists.
    """
    metadata = child.raw["metadata"]
    owner = controller_of(child.raw)
    is_of_the_name = (owner.get("kind"), owner.get("name")) == (names.KIND, _labels(child.raw).get(names.LABEL_JOB))
    return is_of_the_name and owner.get("uid") != uid and "deletionTimestamp" not in metadata


def has_no_set(pod: ObservedPod, sets: Collection[str]) -> bool:
    """Whether a pod's StatefulSet is none of those that exist (UIDs), so that nothing will delete the pod."""
    return pod.deletion_time is None and pod.controller not in ("", *sets)


def controller_of(child: Object) -> Object:
    """Return the owner reference of an object's controller, empty if it has none."""
    return next((ref for ref in mappings(child["metadata"].get("ownerReferences")) if ref.get("controller")), {})


def owner_of(child: Object) -> str:
    """Return the UID of an object's job by its label, "" if it has none."""
    return text(_labels(child).get(names.LABEL_JOB_UID))


def read_pods(pods: Iterable[Object]) -> list[tuple[str, ObservedPod]]:
    """Read pods, each after the UID of its job."""
    return [(owner_of(pod), read_pod(pod)) for pod in pods]


def read_child(kind: str, child: Object) -> Child:
    """Read a child other than a pod, without what changes although nothing does that the operator wrote."""
    has_status = kind in (names.QUEUE_KIND, "Job")  # others' status says nothing that decides
    kept = (*_KEPT_METADATA, *(("resourceVersion", "generation") if kind == names.QUEUE_KIND else ()))
    said = {name: child["metadata"][name] for name in kept if name in child["metadata"]}
    rest = {name: value for name, value in child.items() if name != "metadata" and (has_status or name != "status")}
    raw = rest | {"apiVersion": names.api_version(kind), "kind": kind, "metadata": said}
    return Child(kind=kind, name=said["name"], uid=said["uid"], raw=raw)


def nodes_to_check(observed: Observed, *, was_running: bool) -> frozenset[str]:
    """Return the nodes that may be lost: a pod on them is being taken away, or is not ready although it should be."""
    something_ended = any(pod.outcome for pod in observed.pods.values())
    return frozenset(
        pod.node
        for pod in observed.pods.values()
        if pod.node is not None
        and (
            pod.deletion_time
            or pod.disruption
            or ((was_running or something_ended) and not pod.ready and not pod.outcome)
        )
    )


def lost_since(node: Object | None, now: str) -> str | None:
    """Return since when a node is lost (not ready, or no longer in the cluster), or None if it is ready."""
    if node is None:
        return now
    ready = condition(mapping(node.get("status")), "Ready")
    return None if ready.get("status") == "True" else known_time(ready.get("lastTransitionTime")) or now


def read_pod(pod: Object) -> ObservedPod:
    """Read one pod. Only its name and UID are counted on: labels are anybody's, and its status is partly the pod's own.

    An attempt that is no number is -1: the pod belongs to no attempt.
    """
    metadata, status, labels = pod["metadata"], mapping(pod.get("status")), _labels(pod)
    container = next((s for s in mappings(status.get("containerStatuses")) if s.get("name") == names.CONTAINER), {})
    outcome, progress = _outcome(status, container)
    attempt = text(labels.get(names.LABEL_ATTEMPT, "0"))
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=text(labels.get(names.LABEL_GROUP)),
        attempt=int(attempt) if attempt.isdecimal() and len(attempt) < 19 else -1,
        node=text(mapping(pod.get("spec")).get("nodeName"))[:253] or None,
        ip=text(status.get("podIP")) or None,
        ready=condition(status, "Ready").get("status") == "True",
        unschedulable=_unschedulable(status),
        waiting=_waiting(status, container),
        restarts=number(container.get("restartCount"), 0),
        outcome=outcome,
        final_progress=progress,
        deletion_time=known_time(metadata.get("deletionTimestamp")) or None,
        disruption=_disruption(status),
        evicted_by_taint=condition(status, "DisruptionTarget").get("reason") == "DeletionByTaintManager",
        held_by=_holder(metadata, container),
        downloads=labels.get(names.LABEL_ROLE) == names.ROLE_DOWNLOAD,
        controller=text(controller_of(pod).get("uid")),
    )


def _waiting(status: Object, container: Object) -> str | None:
    """Return why the job's container does not start. While init containers run, one of them that waits is why."""
    for one in [*mappings(status.get("initContainerStatuses")), container]:
        if waiting := mapping(mapping(one.get("state")).get("waiting")):
            why = _joined(waiting.get("reason"), waiting.get("message")) or "no reason given"
            if one is container:
                return why
            if not why.startswith("PodInitializing"):
                return f"init container {text(one.get('name'))}: {why}"
    return None


def _holder(metadata: Object, container: Object) -> str:
    finalizers = metadata.get("finalizers")
    if finalizers and isinstance(finalizers, list):
        return f"its finalizers hold it ({', '.join(map(str, finalizers))}), which a deletion by force does not remove"
    if mapping(container.get("state")).get("terminated"):
        return "its container has ended, its kubelet still holds it: usually a volume that does not unmount"
    return "its container has not ended: usually a process that waits for storage or a device"


_DISRUPTIONS = {
    "PreemptionByScheduler": (Reason.PREEMPTED, "the scheduler gave its place to a pod of higher priority"),
    "DeletionByPodGC": (Reason.NODE_LOST, "its node no longer exists"),
    "DeletionByTaintManager": (Reason.EVICTED, "its node got a taint that it does not tolerate"),
    "EvictionByEvictionAPI": (
        Reason.EVICTED,
        "evicted through the API, for example by kubectl drain or an autoscaler",
    ),
    "TerminationByKubelet": (
        Reason.EVICTED,
        "its kubelet ended it because the node runs short of a resource or shuts down",
    ),
}
"""Reasons of the pod condition DisruptionTarget (KEP-3329), with our reason and what it means."""


def _disruption(status: Object) -> Disruption | None:
    target = condition(status, "DisruptionTarget")
    if target.get("status") == "True":
        said = _joined(target.get("reason"), target.get("message"))
        reason, meaning = _DISRUPTIONS.get(text(target.get("reason")), (Reason.EVICTED, "the cluster took it away"))
        return Disruption(reason=reason, message=clip(f"{meaning} ({said.strip()})", 4096))
    if status.get("reason") == "Evicted":  # the node ran short of a resource, or the pod exceeded its own limits
        message = f"evicted by its kubelet: {text(status.get('message'))}"
        return Disruption(reason=Reason.EVICTED, message=clip(message, 4096))
    return None


def _unschedulable(status: Object) -> str | None:
    scheduled = condition(status, "PodScheduled")
    return text(scheduled.get("message")) or "no reason given" if scheduled.get("status") == "False" else None


def _outcome(status: Object, container: Object) -> tuple[MemberOutcome | None, Progress | None]:
    """Return how the launcher ended and its final progress; both None while it runs.

    The result may be in lastState: the kubelet has then restarted the container, which only waits.
    """
    states = [mapping(mapping(container.get(key)).get("terminated")) for key in ("lastState", "state")]
    ended = next((state for state in states if state), None)
    if ended is None:
        if status.get("phase") == "Failed":  # evicted, or refused by the kubelet: there is no container status
            reason = text(status.get("reason")) or Reason.POD_FAILED
            message = _joined(status.get("reason"), status.get("message")) or "the pod failed"
            return _ended(-1, reason, message, ""), None
        return None, None
    said, finished = text(ended.get("message")), known_time(ended.get("finishedAt"))
    try:
        raw = lenient.plain(from_json(said))
        result = lenient.read(Outcome, raw if isinstance(raw, dict) else {})
    except ValueError:  # no result of ours: the launcher never started, or the kernel killed it
        return _unexplained(ended, said, finished), None
    progress = None if result.progress is None else Progress.read(raw["progress"])
    return _ended(result.exit_code, result.reason, result.message, finished), progress


def _unexplained(ended: Object, said: str, finished: str) -> MemberOutcome:
    exit_code, reason = number(ended.get("exitCode"), -1), text(ended.get("reason")) or Reason.CONTAINER_ERROR
    if exit_code == ExitCode.DONE:
        exit_code, reason = -1, Reason.OUTCOME_MISSING
        doubt = "is spec.image a workload image of grpo-operator?"
        said = f"the container exited 0 but wrote no result: {doubt} Its output: {said}"
    return _ended(exit_code, reason, said, finished)


def _ended(exit_code: int, reason: str, message: str, finished: str) -> MemberOutcome:
    return MemberOutcome(
        exit_code=int(exit_code), reason=clip(reason, 128), message=clip(message, 4096), finished_at=finished
    )


def condition(status: Object, kind: str) -> Object:
    """Return the condition of a type in an object's status, empty if there is none."""
    return next((c for c in mappings(status.get("conditions")) if c.get("type") == kind), {})


def _labels(child: Object) -> Object:
    return mapping(child["metadata"].get("labels"))


def _joined(*values: object) -> str:
    return ": ".join(said for value in values if (said := text(value)))
