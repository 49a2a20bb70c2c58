"""What an account asked of the API server, out of its audit log, and what its roles would have let it ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Grant = tuple[str, str, str]
"""Group, resource (with its subresource), verb."""


def events(log: Path, word: str) -> Iterator[dict[str, Any]]:
    """Whatever of the log has a word in it."""
    with log.open() as lines:
        for line in lines:
            if word in line and line.endswith("\n"):  # the last one may be half written
                yield json.loads(line)


def requests(log: Path, user: str) -> Iterator[dict[str, Any]]:
    """What the user asked about objects."""
    for event in events(log, user):
        if event["user"].get("username") == user and "objectRef" in event:
            yield event


def _grant(event: dict[str, Any]) -> Grant:
    about = event["objectRef"]
    subresource = f"/{about['subresource']}" if "subresource" in about else ""
    return about.get("apiGroup", ""), about["resource"] + subresource, event["verb"]


def used(log: Path, user: str) -> set[Grant]:
    """Every right that the user made use of. A server-side apply that made an object is a patch and needs `create` too."""
    found = set()
    for event in requests(log, user):
        group, resource, verb = _grant(event)
        code = event["responseStatus"]["code"]
        if code == 403:
            continue
        found.add((group, resource, verb))
        if verb == "patch" and code == 201:
            found.add((group, resource, "create"))
    return found


def denials(log: Path, user: str) -> list[str]:
    """What the user was refused for want of a right; refusals of an object as such (policies, quotas, namespaces at their end) are none."""
    refused = [event for event in requests(log, user) if event["responseStatus"]["code"] == 403]
    return [
        event["responseStatus"].get("message", "") for event in refused if " cannot " in event["responseStatus"].get("message", " cannot ")
    ]


def namespaces(log: Path, user: str) -> set[str]:
    """Namespaces that the user's requests were about; an empty one for requests about the whole cluster."""
    return {event["objectRef"].get("namespace", "") for event in requests(log, user)}


def granted(roles: list[dict[str, Any]]) -> set[Grant]:
    """Every right that roles give."""
    rules = [rule for role in roles for rule in role["rules"]]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
