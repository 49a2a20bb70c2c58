"""What happened to a job, from the cluster's events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from grpo_cli import words
from grpo_operator import names

Object = Mapping[str, Any]

EVENTS_SHOWN = 6
NOISE = ("Unhealthy",)
"""Every pod that starts fails its readiness probe until its ranks run; pods that are not ready are told by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event."""

    seconds_ago: float
    is_warning: bool
    reason: str
    about: str
    message: str


def newest(events: Sequence[Object], job: str, now: datetime) -> list[Happening]:
    """What happened to the job, and what went wrong with its pods, newest first; what several pods share is told once."""
    alike: dict[tuple[str, str, str], list[Object]] = {}
    for event in sorted(events, key=lambda each: (_moment(each), int(each["metadata"].get("resourceVersion") or 0)), reverse=True):
        about = event["involvedObject"]
        own = about.get("kind") == names.KIND and about.get("name") == job
        if own or (event.get("type") == "Warning" and event.get("reason") not in NOISE):
            kind = "" if own else about.get("kind", "").lower()
            alike.setdefault((kind, event.get("reason", ""), event.get("message", "")), []).append(event)
    return [
        Happening(
            seconds_ago=words.since(_moment(same[0]), now) or 0.0,
            is_warning=same[0].get("type") == "Warning",
            reason=reason,
            about=f"{kind}/{words.some(sorted({event['involvedObject']['name'] for event in same}), 1)}" if kind else "",
            message=message,
        )
        for (kind, reason, message), same in list(alike.items())[:EVENTS_SHOWN]
    ]


def _moment(event: Object) -> str:
    newest = (event.get("series") or {}).get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    # Some are told in microseconds, some in seconds.
    return str(newest or event["metadata"]["creationTimestamp"])[:19] + "Z"
