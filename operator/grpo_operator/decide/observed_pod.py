"""Reduce a pod, as the API server returns it, to what decisions need. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from pydantic_core import from_json

from grpo_operator.api import names
from grpo_operator.api.status import Disruption, MemberOutcome
from grpo_operator.api.times import known_time
from grpo_operator.decide.objects import Object, condition, controller_of, finalizers_of, labels_of
from grpo_operator.layout.downloads import MOST_MEMORY
from grpo_spec import lenient
from grpo_spec.lenient import clip, mapping, mappings, number, text
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome, Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ending:
    """An end of the pod's container."""

    outcome: MemberOutcome
    attempt: int | None = None  # which attempt ended then, if the launcher could say so
    progress: Progress | None = None  # in the launcher's result


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
    endings: tuple[Ending, ...]  # of its container, the oldest first
    deletion_time: datetime | None  # end of the grace period, if the pod is being deleted
    disruption: Disruption | None  # why the cluster takes the pod away, if it does
    prepared: bool | None = None  # whether its volumes are mounted and its network is made, if that is known
    evicted_by_taint: bool = False  # because of its node's taint; Kubernetes taints nodes that are lost
    held_by: str = ""  # what keeps a pod that is being deleted
    finalizers: str = ""  # those that keep it in any case
    role: str = ""  # as its label says
    controller: str = ""  # UID of the StatefulSet that deletes it when the time comes
    controller_place: tuple[str, str] = ("", "")  # its kind and name
    is_orphan: bool = False  # it has no controller, so nothing ends it
    deleted_for_good: bool = False  # without a grace period: only finalizers keep it
    announced_attempt: int | None = None  # the attempt that begins in it, as its annotation says
    scheduled: datetime | None = None  # time since which it holds its GPUs
    gone_at: datetime | None = None  # time when the operator saw that it no longer exists

    @property
    def is_of_an_attempt(self) -> bool:
        """Whether it is neither an environment pod nor one of the Job that downloads."""
        return self.role not in (names.ROLE_DOWNLOAD, names.Role.ENVIRONMENT)

    @property
    def outcome(self) -> MemberOutcome | None:
        """The end of its launcher; None while it runs. A container that is started again after that only waits."""
        return self.endings[0].outcome if self.endings else None

    @property
    def final_progress(self) -> Progress | None:
        """Progress in the launcher's result."""
        return self.endings[0].progress if self.endings else None

    def without(self, attempts: range) -> ObservedPod:
        """Return the pod without how these attempts ended in it: a later one has begun in it since."""
        kept = tuple(one for one in self.endings if one.attempt not in attempts)
        if len(kept) == len(self.endings):
            return self
        return replace(self, endings=kept, restarts=self.restarts if kept else 0)


def read_pod(pod: Object) -> ObservedPod:
    """Read one pod. Only its name and UID are counted on: labels are anybody's, and its status is partly the pod's own.

    An attempt that is no number is -1: the pod belongs to no attempt.
    """
    metadata, status, labels = pod["metadata"], mapping(pod.get("status")), labels_of(pod)
    container = next((s for s in mappings(status.get("containerStatuses")) if s.get("name") == names.CONTAINER), {})
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=text(labels.get(names.LABEL_GROUP)),
        attempt=_number(labels.get(names.LABEL_ATTEMPT, "0"), -1),
        node=text(mapping(pod.get("spec")).get("nodeName"))[:253] or None,
        ip=text(status.get("podIP")) or None,
        ready=condition(status, "Ready").get("status") == "True",
        unschedulable=_unschedulable(status),
        waiting=_waiting(status, container),
        restarts=number(container.get("restartCount"), 0),
        endings=_endings(status, container, text(labels.get(names.LABEL_ROLE))),
        deletion_time=known_time(metadata.get("deletionTimestamp")),
        disruption=_disruption(status),
        prepared=_prepared(status),
        evicted_by_taint=condition(status, "DisruptionTarget").get("reason") == "DeletionByTaintManager",
        held_by=_holder(finalizers_of(pod), container),
        finalizers=finalizers_of(pod),
        role=text(labels.get(names.LABEL_ROLE)),
        controller=text(controller_of(pod).get("uid")),
        controller_place=(text(controller_of(pod).get("kind")), text(controller_of(pod).get("name"))),
        is_orphan=not controller_of(pod),
        deleted_for_good="deletionTimestamp" in metadata and metadata.get("deletionGracePeriodSeconds") == 0,
        announced_attempt=_number(mapping(metadata.get("annotations")).get(names.ANNOTATION_ATTEMPT), None),
        scheduled=_scheduled(pod, status),
    )


def _number(said: object, otherwise: T) -> int | T:
    """Read the number of an attempt."""
    digits = text(said)
    return int(digits) if digits.isdecimal() and len(digits) < 19 else otherwise


def _scheduled(pod: Object, status: Object) -> datetime | None:
    if not mapping(pod.get("spec")).get("nodeName"):
        return None
    placed = condition(status, "PodScheduled")
    since = known_time(placed.get("lastTransitionTime")) if placed.get("status") == "True" else None
    return since or known_time(pod["metadata"].get("creationTimestamp"))


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


def _prepared(status: Object) -> bool | None:
    said = text(condition(status, "PodReadyToStartContainers").get("status"))
    return said == "True" if said in ("True", "False") else None


def _holder(finalizers: str, container: Object) -> str:
    if finalizers:
        return f"its finalizers hold it ({finalizers}), which a deletion by force does not remove"
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
    # For a node that runs short of a resource, kubelets set the condition; not for a pod that exceeds its own limits.
    if status.get("reason") == "Evicted":
        message = f"evicted by its kubelet for a limit of its own: {text(status.get('message'))}"
        return Disruption(reason=Reason.EVICTED, message=clip(message, 4096), own_fault=True)
    return None


_NEVER = re.compile(
    r"0/(\d+) nodes are available: .*\bInsufficient .*\b0/\1 nodes are available: \1 Preemption is not helpful"
)
"""The scheduler's words if no node that the pod may use has as much in all as it asks for. Older ones do not tell."""


def _unschedulable(status: Object) -> str | None:
    scheduled = condition(status, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    said = _each_once(text(scheduled.get("message"))) or "no reason given"
    return f"{said} Each node that it may use is too small, even when it is empty" if _NEVER.search(said) else said


def _each_once(said: str) -> str:
    """Return a text without the sentences that it repeats: of a gang, the scheduler says the same for several pods."""
    kept: dict[str, str] = {}
    for sentence in re.split(r"(?<=[.;])\s+|\n+", said):
        kept.setdefault(sentence.rstrip(".;"), sentence)
    return " ".join(kept.values())


def _endings(status: Object, container: Object, role: str) -> tuple[Ending, ...]:
    """Return how the launcher ended; empty while it runs.

    The first result may be in lastState: the kubelet has then restarted the container, which only waits, unless a later
    attempt began in it.
    """
    states = [mapping(mapping(container.get(key)).get("terminated")) for key in ("lastState", "state")]
    if ended := [state for state in states if state]:
        return tuple(_ending(state, role) for state in ended)
    if status.get("phase") == "Failed":  # evicted, or refused by the kubelet: there is no container status
        reason = text(status.get("reason")) or Reason.POD_FAILED
        message = _joined(status.get("reason"), status.get("message")) or "the pod failed"
        return (Ending(_ended(-1, reason, message, None)),)
    waits = mapping(mapping(container.get("state")).get("waiting"))
    if waits.get("reason") == "InvalidImageName":  # no kubelet ever reads it in another way
        return (Ending(_ended(-1, Reason.CONFIG_ERROR, f"spec.image: {text(waits.get('message'))}", None)),)
    return ()


def _ending(ended: Object, role: str) -> Ending:
    said, finished = text(ended.get("message")), known_time(ended.get("finishedAt"))
    try:
        raw = lenient.plain(from_json(said))
        result = lenient.read(Outcome, raw if isinstance(raw, dict) else {})
    except ValueError:  # no result of ours: the launcher never started, or the kernel killed it
        return Ending(_unexplained(ended, said, finished, role))
    progress = None if result.progress is None else Progress.read(raw["progress"])
    outcome = _ended(result.exit_code, result.reason, result.message, finished)
    return Ending(outcome, result.attempt, progress)


_MORE_MEMORY = "it exceeded its memory limit: raise podTemplate.resources.limits.memory"
_MORE_MEMORY_TO_DOWNLOAD = (
    f"it exceeded its memory limit, podTemplate.resources.limits.memory but at most {MOST_MEMORY}: raise that if it is "
    "less, else set cache.prefetch to false, and trainer pods download with the memory that they have"
)
_NO_PACKAGE = re.compile(r"python[\d.]*: [^\n]*No module named '?grpo_workload\b[^\n]*\s*\Z")
_NO_PYTHON = re.compile(r'exec: "python": executable file not found')


def _lacks_programs(exit_code: int, reason: str, said: str) -> bool:
    """Whether Python, or the container runtime, says that our programs are not in the image."""
    if reason in ("StartError", "ContainerCannotRun"):
        return _NO_PYTHON.search(said) is not None
    return exit_code == 1 and _NO_PACKAGE.search(said) is not None


def _unexplained(ended: Object, said: str, finished: datetime | None, role: str) -> MemberOutcome:
    exit_code, reason = number(ended.get("exitCode"), -1), text(ended.get("reason")) or Reason.CONTAINER_ERROR
    if _lacks_programs(exit_code, reason, said):
        use = "use a workload image of the operator's release, or one made FROM it (docs/custom-image.md)"
        reason, said = Reason.CONFIG_ERROR, f"spec.image does not hold the programs of this release: {use}\n{said}"
    elif exit_code == ExitCode.DONE:
        exit_code, reason = -1, Reason.OUTCOME_MISSING
        said = f"the container exited 0 but wrote no result: is spec.image a workload image of grpo-operator?\n{said}"
    elif reason == "OOMKilled":
        said = f"{_MORE_MEMORY_TO_DOWNLOAD if role == names.ROLE_DOWNLOAD else _MORE_MEMORY}\n{said}"
    elif lines := said.strip().splitlines():
        said = said if len(lines) == 1 else f"{lines[-1]}\n{said}"
    else:
        said = "it ended without a result and without a log"
    return _ended(exit_code, reason, said.rstrip(), finished)


def _ended(exit_code: int, reason: str, message: str, finished: datetime | None) -> MemberOutcome:
    return MemberOutcome(
        exit_code=int(exit_code), reason=clip(reason, 128), message=clip(message, 4096), finished_at=finished
    )


def _joined(*values: object) -> str:
    return ": ".join(said for value in values if (said := text(value)))
