"""The events of the cluster that a job's screen shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from grpo_cli.screen import words
from grpo_operator.api import names

Object = Mapping[str, Any]

EVENTS_SHOWN = 6
NOISE = ("Unhealthy",)
"""Reasons left out: a pod fails its readiness probe until its ranks run; the screen lists such pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event, or several alike."""

    seconds_ago: float
    is_warning: bool
    reason: str
    about: str
    message: str


def newest(events: Sequence[Object], job: str, now: datetime) -> list[Happening]:
    """Return events of the job and warnings of its pods, newest first; events that several pods share are one."""
    alike: dict[tuple[str, str, str], list[Object]] = {}
    for event in sorted(
        events, key=lambda each: (_moment(each), int(each["metadata"].get("resourceVersion") or 0)), reverse=True
    ):
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
            about=f"{kind}/{words.some(sorted({event['involvedObject']['name'] for event in same}), 1)}"
            if kind
            else "",
            message=message,
        )
        for (kind, reason, message), same in list(alike.items())[:EVENTS_SHOWN]
    ]


def warnings_of_pods(events: Sequence[Object]) -> dict[str, str]:
    """Return the message of the newest warning about each pod, by the pod's UID."""
    found = [one for one in events if one.get("type") == "Warning" and one.get("reason") not in NOISE]
    return {str(one["involvedObject"].get("uid")): str(one.get("message", "")) for one in sorted(found, key=_moment)}


def _moment(event: Object) -> str:
    newest = (event.get("series") or {}).get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    # Some have microseconds, some only seconds.
    return str(newest or event["metadata"]["creationTimestamp"])[:19] + "Z"
