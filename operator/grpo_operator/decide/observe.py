"""Reduce a job's children, as the API server returns them, to what decisions need. Pure."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from grpo_operator.api import names
from grpo_operator.api.times import known_time
from grpo_operator.decide.objects import Object, condition, finalizers_of, labelled_job, was_applied
from grpo_operator.decide.observed_pod import ObservedPod, read_pod
from grpo_spec.lenient import mapping
from grpo_spec.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child object other than a pod."""

    kind: str
    name: str
    uid: str
    was_applied: bool = True
    """False if the operator created the object and has not applied it yet."""

    packed: bytes = field(repr=False)
    """The object. Thousands of jobs have millions of dictionaries and lists, among which Python would look for garbage
    for seconds, and an operator that stands still for so long loses its Lease."""

    @property
    def raw(self) -> Any:
        """The object as a dictionary of one's own."""
        return marshal.loads(self.packed)


def pack(raw: dict[str, Any]) -> bytes:
    """Return an object for `Child.packed`; equal ones with their fields in the same order are the same bytes."""
    return marshal.dumps(raw, 2)  # version 2: later ones write shared values once, so equal objects may differ


class Left(NamedTuple):
    """A pod that still exists although it should end."""

    why: str = ""  # what keeps it, if anything is known to
    killed: datetime | None = None  # when its kubelet kills what still runs in it, unless something keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The state of a job's children at one moment."""

    pods: Mapping[str, ObservedPod]
    """Existing pods of attempts, by name."""

    environment_pods: Mapping[str, ObservedPod] = field(default_factory=dict)
    """Existing environment pods, by name."""

    downloaders: tuple[ObservedPod, ...] = ()
    """Pods of the Job that downloads."""

    gone: Mapping[str, ObservedPod] = field(default_factory=dict)
    """The final state of pods just deleted, by UID."""

    children: tuple[Child, ...] = ()
    """All other children."""

    foreign: tuple[str, ...] = ()
    """Objects that an earlier job of the same name left behind: kind/name, and what holds them."""

    abandoned: tuple[tuple[str, str, str], ...] = ()
    """Those of them whose owner no longer exists and that nobody is deleting: kind, name and UID."""

    strange_pods: tuple[str, ...] = ()
    """Pods that carry the job's label and that no job of this name owns, by name. They are left alone."""

    why_absent: tuple[Reason, str] | None = None
    """The cause for which the first pod that should exist does not (reason, message): another's has its name, or the
    cluster refuses it."""

    lost_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Time at which each node that is not ready stopped being so, by its name; only nodes that were read."""

    absent_nodes: frozenset[str] = frozenset()
    """The lost nodes that no longer exist."""

    ready_nodes: frozenset[str] = frozenset()
    """Nodes that were read and are not lost."""

    has_queues: bool = False
    """Whether the cluster has Kueue, so that a Workload that is not among the children does not exist."""


KINDS_WITH_PODS = ("StatefulSet", "Job")
"""Kinds of children that create the job's pods."""

_KEPT_METADATA = (
    "name",
    "namespace",
    "uid",
    "labels",
    "annotations",
    "ownerReferences",
    "deletionTimestamp",
    "finalizers",
)


def observe(
    uid: str,
    *,
    pods: Iterable[tuple[str, ObservedPod]],
    others: Iterable[tuple[str, Child]] = (),
    gone: Iterable[ObservedPod] = (),
    over: range = range(0),
    members: Collection[str] = (),
    gone_sets: Collection[str] = (),
) -> Observed:
    """Sort objects that carry the job's label into those of the job with this UID, those of an earlier job of the same
    name, and those of others, which are left out.

    Each pod comes after the UID that its label says, each other object after the UID of its owner. A pod belongs to the
    owner of its StatefulSet or Job. `members`: UIDs of pods that were the job's when its status was written.
    `gone_sets`: UIDs of StatefulSets and Jobs that no longer exist: of pods that they left, only the label says whose.
    `gone`: the final state of pods that were just deleted. `over`: earlier attempts in the same pods, whose ends say
    nothing about the current one.
    """
    others = list(others)
    sets = {child.uid: owner for owner, child in others if child.kind in KINDS_WITH_PODS}

    def owner_of_pod(label: str, pod: ObservedPod) -> str:
        if pod.uid in members:
            return uid
        return label if pod.controller in gone_sets else sets.get(pod.controller, "")

    whose = [(owner_of_pod(label, pod), pod.without(over)) for label, pod in pods]
    own = [pod for owner, pod in whose if owner == uid]
    left = [pod for owner, pod in whose if owner not in ("", uid)]
    foreign = [child for owner, child in others if owner not in ("", uid)]
    return Observed(
        pods={pod.name: pod for pod in own if pod.is_of_an_attempt},
        environment_pods={pod.name: pod for pod in own if pod.role == names.Role.ENVIRONMENT},
        downloaders=tuple(pod for pod in own if pod.role == names.ROLE_DOWNLOAD),
        gone={pod.uid: pod.without(over) for pod in gone},
        children=tuple(child for owner, child in others if owner == uid),
        foreign=(*(f"pod/{pod.name}" for pod in left), *map(_describe, foreign)),
        abandoned=(
            *(("Pod", pod.name, pod.uid) for pod in left if has_no_set(pod, sets)),
            *((child.kind, child.name, child.uid) for child in foreign if not is_being_deleted(child)),
        ),
        strange_pods=tuple(pod.name for owner, pod in whose if owner == ""),
    )


def _describe(child: Child) -> str:
    held = finalizers_of(child.raw) if is_being_deleted(child) else ""
    return f"{child.kind.lower()}/{child.name}" + (f" (its finalizers hold it: {held})" if held else "")


def is_being_deleted(child: Child) -> bool:
    """Whether somebody has deleted a child that still exists."""
    return "deletionTimestamp" in child.raw["metadata"]


def has_no_set(pod: ObservedPod, sets: Collection[str]) -> bool:
    """Whether a pod's StatefulSet is none of those that exist (UIDs), so that nothing will delete the pod."""
    return pod.deletion_time is None and pod.controller not in ("", *sets)


def read_pods(pods: Iterable[Object]) -> list[tuple[str, ObservedPod]]:
    """Read pods, each after the UID of the job that its label says."""
    return [(labelled_job(pod), read_pod(pod)) for pod in pods]


def read_child(kind: str, child: Object) -> Child:
    """Read a child other than a pod, without what changes although nothing does that the operator wrote."""
    has_status = kind in (names.QUEUE_KIND, "Job")  # others' status says nothing that decides
    kept = (*_KEPT_METADATA, *(("resourceVersion", "generation") if kind == names.QUEUE_KIND else ()))
    said = {name: child["metadata"][name] for name in kept if name in child["metadata"]}
    left_out = ("apiVersion", "kind", "metadata", *(() if has_status else ("status",)))
    rest = {name: value for name, value in child.items() if name not in left_out}
    first = {"apiVersion": names.api_version(kind), "kind": kind, "metadata": said}  # items of lists lack the first two
    return Child(
        kind=kind, name=said["name"], uid=said["uid"], was_applied=was_applied(child), packed=pack(first | rest)
    )


def nodes_to_check(observed: Observed, *, was_running: bool) -> frozenset[str]:
    """Return the nodes that may be lost: a pod on them is being taken away, or is not ready although it should be."""
    something_ended = any(pod.outcome for pod in observed.pods.values())
    suspect = [
        pod
        for pod in observed.pods.values()
        if pod.deletion_time
        or pod.disruption
        or ((was_running or something_ended) and not pod.ready and not pod.outcome)
    ]
    leaving = [pod for pod in observed.downloaders if pod.deletion_time and not pod.outcome]
    leaving += [pod for pod in observed.environment_pods.values() if pod.deletion_time]
    return frozenset(pod.node for pod in (*suspect, *leaving) if pod.node is not None)


def lost_since(node: Object | None, now: datetime) -> datetime | None:
    """Return since when a node is lost (not ready, or no longer in the cluster), or None if it is ready."""
    if node is None:
        return now
    ready = condition(mapping(node.get("status")), "Ready")
    return None if ready.get("status") == "True" else known_time(ready.get("lastTransitionTime")) or now
