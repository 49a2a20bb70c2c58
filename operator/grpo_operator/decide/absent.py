"""A pod that should exist and does not, or whose node does not prepare it, and the cluster's words about it. Pure.

Only events tell that a pod is refused (a quota, a LimitRange, an admission policy, a webhook), or that a volume of it
cannot be mounted (a ConfigMap or Secret that does not exist).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import LONG_AGO, after, known_time
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.downloading import find_try
from grpo_operator.decide.objects import Object
from grpo_operator.decide.observe import Child, Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip, mapping, text
from grpo_spec.reasons import Reason

CLOCK_SECONDS = 60
"""Seconds by which the clock that events carry may be behind. Refusals of earlier attempts, which have the same
StatefulSets, are not quoted."""

_BY_WHOM = re.compile(
    r"^(\(combined from similar events\): )?([Cc]reate Pod \S+ in StatefulSet \S+ failed error: |Error creating: )"
)
_QUOTA = re.compile("(exceeded|failed|status unknown for) quota")


class Missing(NamedTuple):
    """A pod that should exist, and the StatefulSet or Job that creates it. Only a Job knows its pod's name: ""."""

    pod: str
    child: Child


def find_missing(status: GRPOJobStatus, topology: Topology, observed: Observed) -> Missing | None:
    """Return the first pod that should exist and does not; needed ones first, environment pods last."""
    if is_terminal(status):
        return None
    if is_between_attempts(status):
        tried = find_try(observed) if status.attempt is None else None
        there = {pod.controller for pod in observed.downloaders}
        return None if tried is None or tried.uid in there else Missing("", tried)
    sets = {child.name: child for child in observed.children if child.kind == "StatefulSet"}
    for name in (*topology.needed_pods, *topology.elastic_pods, *topology.environment_pods):
        group, _, ordinal = name.rpartition("-")
        if (
            name not in observed.pods
            and name not in observed.environment_pods
            and group in sets
            and int(ordinal) < (sets[group].raw["spec"].get("replicas") or 0)
        ):
            return Missing(name, sets[group])
    return None


def explain(missing: Missing, events: Iterable[Object], began: datetime | None) -> tuple[Reason, str] | None:
    """Return how the cluster last refused a pod (reason, message), None if it did not.

    `events`: those of what creates the pod. `began`: when the attempt began.
    """
    since = after(began, -CLOCK_SECONDS) if began and missing.pod else None
    found = [(at, text(event.get("note"))) for event in events if (at := _last_seen(event)) is not None]
    # Whose a pod is that exists already can be seen.
    said = [(at, note) for at, note in found if (since is None or at >= since) and not note.endswith("already exists")]
    if not said:
        return None
    words = _BY_WHOM.sub("", max(said)[1])
    pod = f"pod {missing.pod}" if missing.pod else "the pod that downloads"
    reason = Reason.QUOTA_EXCEEDED if exceeds_quota(words) else Reason.CHILD_REFUSED
    return reason, f"the cluster refuses {pod}, and is asked again: {clip(words, 2048)}"


def find_unprepared(status: GRPOJobStatus, observed: Observed) -> ObservedPod | None:
    """Return the first pod, by its name, whose volumes are not mounted or whose network is not made."""
    if is_terminal(status):
        return None
    pods = (*observed.pods.values(), *observed.environment_pods.values(), *observed.downloaders)
    held = (
        one
        for one in pods
        if one.prepared is False and one.waiting and not (one.ready or one.outcome or one.deletion_time)
    )
    return min(held, key=lambda one: one.name, default=None)


def explain_unprepared(events: Iterable[Object]) -> tuple[Reason, str] | None:
    """Return the newest of a pod's warnings; None if there is none, or its image has been pulled since.

    A kubelet also says which volumes it has waited for in vain. That comes last: it does not say why.
    """
    warnings, pulled = list[tuple[bool, datetime, str]](), LONG_AGO
    for event in events:
        at, reason, note = _last_seen(event) or LONG_AGO, text(event.get("reason")), text(event.get("note"))
        if reason == "Pulling":  # kubelets before 1.35 call a pod prepared only when they have its image
            pulled = max(pulled, at)
        elif event.get("type") == "Warning":
            warnings.append((not note.startswith("Unable to attach or mount volumes"), at, f"{reason}: {note}"))
    if not warnings or pulled >= max(at for _, at, _ in warnings):
        return None
    return Reason.CONTAINER_WAITING, clip(max(warnings)[2], 2048)


def waiting_for(why: str, pod: ObservedPod, seen: Observed) -> Observed:
    """Return what is seen with why this pod waits."""
    named = replace(pod, waiting=why)
    return replace(
        seen,
        pods={name: named if one is pod else one for name, one in seen.pods.items()},
        environment_pods={name: named if one is pod else one for name, one in seen.environment_pods.items()},
        downloaders=tuple(named if one is pod else one for one in seen.downloaders),
    )


def exceeds_quota(said: str) -> bool:
    """Whether the API server refuses an object because of a ResourceQuota."""
    return _QUOTA.search(said) is not None


def _last_seen(event: Object) -> datetime | None:
    series = mapping(event.get("series")).get("lastObservedTime")
    times = (known_time(said) for said in (series, event.get("deprecatedLastTimestamp"), event.get("eventTime")))
    return next((time for time in times if time), None)
