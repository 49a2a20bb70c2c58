"""What the API server says of a job's children, boiled down to what decisions need. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from grpo_operator import names
from grpo_operator.jobstatus import Disruption, MemberOutcome
from grpo_operator.names import Reason
from grpo_workload.contract import ExitCode, Outcome, Progress

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One pod of the job, as it is now."""

    name: str
    uid: str
    group: str
    epoch: int
    node: str | None
    ip: str | None
    ready: bool
    unschedulable: str | None  # why the scheduler finds no node for it
    waiting: str | None  # why its container does not start: "ErrImagePull: ..."
    restarts: int
    outcome: MemberOutcome | None
    final_progress: Progress | None  # what its launcher's result says of the training
    deletion_time: str | None  # when its grace is over, if it is being deleted
    disruption: Disruption | None  # why the cluster takes it away, if it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child that is no pod."""

    kind: str
    name: str
    uid: str
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job's children at one moment."""

    pods: Mapping[str, ObservedPod]  # by name
    gone: Mapping[str, ObservedPod] = field(default_factory=dict)  # by UID: how pods that were deleted just now were at last
    children: tuple[Child, ...] = ()
    foreign: tuple[str, ...] = ()  # children of an earlier job of the same name, still there: kind/name
    lost_nodes: Mapping[str, str] = field(default_factory=dict)  # since when a node is not ready, of those that were looked at
    absent_nodes: frozenset[str] = frozenset()  # of them, those that are no longer there


def observe(uid: str, *, pods: Iterable[Object], others: Iterable[Object], gone: Iterable[Object] = ()) -> Observed:
    """Sort what carries the job's label into its own pods and what an earlier job of the same name left behind.

    `gone`: how pods of the job that were deleted just now were at last.
    """
    own: dict[str, ObservedPod] = {}
    children: list[Child] = []
    foreign: list[str] = []
    for pod in pods:
        if pod["metadata"]["labels"].get(names.LABEL_JOB_UID) == uid:
            own[pod["metadata"]["name"]] = read_pod(pod)
        else:
            foreign.append(f"pod/{pod['metadata']['name']}")
    for child in others:
        metadata = child["metadata"]
        if metadata["labels"].get(names.LABEL_JOB_UID) == uid:
            children.append(Child(kind=child["kind"], name=metadata["name"], uid=metadata["uid"], raw=dict(child)))
        else:
            foreign.append(f"{child['kind'].lower()}/{metadata['name']}")
    last = {pod["metadata"]["uid"]: read_pod(pod) for pod in gone}
    return Observed(pods=own, gone=last, children=tuple(children), foreign=tuple(foreign))


def suspects(observed: Observed, *, was_running: bool) -> frozenset[str]:
    """Nodes worth a look: they hold a pod that is being taken away, or that is silent when it should not be."""
    something_ended = any(pod.outcome for pod in observed.pods.values())
    return frozenset(
        pod.node
        for pod in observed.pods.values()
        if pod.node is not None
        and (pod.deletion_time or pod.disruption or ((was_running or something_ended) and not pod.ready and not pod.outcome))
    )


def lost_since(node: Object | None, now: str) -> str | None:
    """Since when a node is lost: not ready, or no longer there; None when it is well."""
    if node is None:
        return now
    ready = _condition(node.get("status", {}), "Ready")
    return None if ready.get("status") == "True" else ready.get("lastTransitionTime") or now


def read_pod(pod: Object) -> ObservedPod:
    """One pod's facts."""
    metadata, status = pod["metadata"], pod.get("status", {})
    container: Object = next((s for s in status.get("containerStatuses") or () if s["name"] == names.CONTAINER), {})
    outcome, progress = _outcome(status, container)
    waiting = (container.get("state") or {}).get("waiting")
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=metadata["labels"].get(names.LABEL_GROUP, ""),
        epoch=int(metadata["labels"].get(names.LABEL_EPOCH, "0")),
        node=pod.get("spec", {}).get("nodeName"),
        ip=status.get("podIP"),
        ready=_condition(status, "Ready").get("status") == "True",
        unschedulable=_unschedulable(status),
        waiting=_text(waiting.get("reason"), waiting.get("message")) if waiting else None,
        restarts=container.get("restartCount", 0),
        outcome=outcome,
        final_progress=progress,
        deletion_time=metadata.get("deletionTimestamp"),
        disruption=_disruption(status),
    )


_DISRUPTIONS = {
    "PreemptionByScheduler": (Reason.PREEMPTED, "the scheduler gave its place to a pod of higher priority"),
    "DeletionByPodGC": (Reason.NODE_LOST, "its node is gone"),
    "DeletionByTaintManager": (Reason.EVICTED, "its node got a taint that it does not tolerate"),
    "EvictionByEvictionAPI": (Reason.EVICTED, "evicted through the API, as by kubectl drain or an autoscaler"),
    "TerminationByKubelet": (Reason.EVICTED, "ended by its kubelet, for want of something on the node or at the node's shutdown"),
}
"""Reasons of the pod condition DisruptionTarget (KEP-3329), and what they mean."""


def _disruption(status: Object) -> Disruption | None:
    target = _condition(status, "DisruptionTarget")
    if target.get("status") == "True":
        told = _text(target.get("reason"), target.get("message"))
        reason, meaning = _DISRUPTIONS.get(target.get("reason", ""), (Reason.EVICTED, "the cluster took it away"))
        return Disruption(reason=reason, message=f"{meaning} ({told.strip()})"[:4096])
    if status.get("reason") == "Evicted":  # for the node's sake or for limits of its own
        return Disruption(reason=Reason.EVICTED, message=f"evicted by its kubelet: {status.get('message', '')}"[:4096])
    return None


def _condition(status: Object, kind: str) -> Object:
    return next((c for c in status.get("conditions") or () if c["type"] == kind), {})


def _unschedulable(status: Object) -> str | None:
    scheduled = _condition(status, "PodScheduled")
    return scheduled.get("message") or "no reason given" if scheduled.get("status") == "False" else None


def _text(reason: str | None, message: str | None) -> str:
    return ": ".join(part for part in (reason, message) if part)


def _outcome(status: Object, container: Object) -> tuple[MemberOutcome | None, Progress | None]:
    """How the launcher ended: now, or before the kubelet restarted its container to hold the result."""
    states = [(container.get(key) or {}).get("terminated") for key in ("lastState", "state")]
    ended = next((state for state in states if state), None)
    if ended is None:
        if status.get("phase") == "Failed":  # evicted, or refused by the kubelet: no container status tells more
            message = _text(status.get("reason"), status.get("message")) or "the pod failed"
            return MemberOutcome(exit_code=-1, reason=status.get("reason") or "PodFailed", message=message[:4096], finished_at=""), None
        return None, None
    said, finished = ended.get("message", ""), ended.get("finishedAt") or ""
    try:
        result = Outcome.model_validate_json(said)
    except ValidationError:  # not ours: the container never got as far as the launcher, or the kernel ended it
        return _unexplained(ended, said, finished), None
    outcome = MemberOutcome(exit_code=int(result.exit_code), reason=result.reason, message=result.message[:4096], finished_at=finished)
    return outcome, result.progress


def _unexplained(ended: Object, said: str, finished: str) -> MemberOutcome:
    exit_code, reason = ended.get("exitCode", -1), ended.get("reason") or "Error"
    if exit_code == ExitCode.DONE:
        exit_code, reason = -1, "OutcomeMissing"
        said = f"the container exited 0 without a result: is the image a grpo-operator workload? It said: {said}"
    return MemberOutcome(exit_code=exit_code, reason=reason, message=said[:4096], finished_at=finished)
