"""A pod that should exist and does not, and the cluster's refusal of it. Pure.

A StatefulSet or Job whose pod is refused (a quota, a LimitRange, an admission policy, a webhook) tells events only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after, known_time
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.downloading import find_try
from grpo_operator.decide.objects import Object
from grpo_operator.decide.observe import Child, Observed
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


def exceeds_quota(said: str) -> bool:
    """Whether the API server refuses an object because of a ResourceQuota."""
    return _QUOTA.search(said) is not None


def _last_seen(event: Object) -> datetime | None:
    series = mapping(event.get("series")).get("lastObservedTime")
    times = (known_time(said) for said in (series, event.get("deprecatedLastTimestamp"), event.get("eventTime")))
    return next((time for time in times if time), None)
