"""The nodes that pods look for: near the job's other pods, away from nodes that are to be avoided. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest

T = TypeVar("T", dict[str, Any], list[Any])


def affinity(job: Job, group: Group, user: Manifest, avoid: Sequence[str]) -> Manifest:
    """Return the affinity of a group's pods: the user's, near the job's own pods, and away from the nodes `avoid`."""
    return _away(user if group.role is Role.ENVIRONMENT else _near_each_other(job, group, user), avoid)


def topology_key(job: Job) -> str | None:
    """Return the node label by which Kubernetes' scheduler puts the job's pods near each other, if it is to do so."""
    return None if job.queue or job.admission else job.spec.scheduling.topology_key  # Kueue chooses the place


def own_pods(job: Job, group: Group) -> Manifest:
    """Return the selector of the pods that a pod is near to, or away from: environment pods only know each other."""
    mine = {names.LABEL_JOB_UID: job.uid}
    if group.role is Role.ENVIRONMENT:
        return {"matchLabels": mine | {names.LABEL_ROLE: group.role.value}}
    if job.spec.environment_pods is None:
        return {"matchLabels": mine}
    others = {"key": names.LABEL_ROLE, "operator": "NotIn", "values": [Role.ENVIRONMENT.value]}
    return {"matchLabels": mine, "matchExpressions": [others]}


def _near_each_other(job: Job, group: Group, user: Manifest) -> Manifest:
    """Return the user's affinity, and to the job's own pods by `scheduling.topologyKey`.

    The scheduler does not ask it of the first pod, which finds none: it takes any node that has the label.
    """
    if (label := topology_key(job)) is None:
        return user
    own: Manifest = {"topologyKey": label, "labelSelector": own_pods(job, group)}
    policy = job.spec.scheduling.topology_policy
    key = f"{policy.lower()}DuringSchedulingIgnoredDuringExecution"
    pod = inner(user, "podAffinity", dict, "affinity")
    terms = inner(pod, key, list, "affinity.podAffinity")
    near = own if policy == "Required" else {"weight": 100, "podAffinityTerm": own}
    return {**user, "podAffinity": {**pod, key: [*terms, near]}}


def _away(user: dict[str, Any], avoid: Sequence[str]) -> Manifest:
    """Return the user's affinity plus a preference for nodes not in `avoid`: no rule, since no other node may fit."""
    node = inner(user, "nodeAffinity", dict, "affinity")
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    preferred = inner(node, key, list, "affinity.nodeAffinity")
    if not avoid:
        return user
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid)}
    elsewhere = {"weight": 100, "preference": {"matchExpressions": [away]}}
    return {**user, "nodeAffinity": {**node, key: [*preferred, elsewhere]}}


def inner(holder: Mapping[str, Any], key: str, kind: type[T], where: str) -> T:
    """Return a value of a free-form setting, empty if it is not set. Raises ValueError if it is of another kind."""
    value = holder.get(key, kind())
    if not isinstance(value, kind):
        words = {dict: "an object", list: "a list"}
        raise ValueError(f"podTemplate.{where}.{key} must be {words[kind]}, as in a pod; found {value!r}"[:1024])
    return value
