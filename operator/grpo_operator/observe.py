"""What the API server says of a job's children, boiled down to what decisions need. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from grpo_operator import names
from grpo_operator.jobstatus import MemberOutcome
from grpo_workload.contract import ExitCode, Outcome, Progress

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One trainer pod of the job, as it is now."""

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
    deleting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job's children at one moment."""

    pods: Mapping[str, ObservedPod]  # by name
    foreign: tuple[str, ...]  # children of an earlier job of the same name, still there: kind/name


def observe(uid: str, *, pods: Iterable[Object], others: Iterable[Object]) -> Observed:
    """Sort what carries the job's label into its own pods and what an earlier job of the same name left behind."""
    own: dict[str, ObservedPod] = {}
    foreign: list[str] = []
    for pod in pods:
        if pod["metadata"]["labels"].get(names.LABEL_JOB_UID) == uid:
            own[pod["metadata"]["name"]] = read_pod(pod)
        else:
            foreign.append(f"pod/{pod['metadata']['name']}")
    for child in others:
        if child["metadata"]["labels"].get(names.LABEL_JOB_UID) != uid:
            foreign.append(f"{child['kind'].lower()}/{child['metadata']['name']}")
    return Observed(pods=own, foreign=tuple(foreign))


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
        deleting="deletionTimestamp" in metadata,
    )


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
