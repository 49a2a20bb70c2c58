"""Rights that an account used, from the API server's audit log, and rights that its roles grant."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Grant = tuple[str, str, str]
"""Group, resource (with its subresource), verb."""


def events(log: Path, word: str) -> Iterator[dict[str, Any]]:
    """Yield the events of the log that contain a word."""
    with log.open() as lines:
        for line in lines:
            if word in line and line.endswith("\n"):  # the last line may be incomplete
                yield json.loads(line)


def requests(log: Path, user: str) -> Iterator[dict[str, Any]]:
    """Yield the user's requests that are about objects."""
    for event in events(log, user):
        if event["user"].get("username") == user and "objectRef" in event:
            yield event


def writes(log: Path, user: str, kubeconfig: Path) -> list[dict[str, Any]]:
    """Return the successful requests that changed something, of those of the user with the token of this kubeconfig."""
    token = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"]
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    credential = [f"JTI={claims['jti']}"]
    return [
        event
        for event in requests(log, user)
        if event["user"].get("extra", {}).get("authentication.kubernetes.io/credential-id") == credential
        and event["verb"] not in ("get", "list", "watch")
        and event["responseStatus"]["code"] < 400
    ]


def _grant(event: dict[str, Any]) -> Grant:
    about = event["objectRef"]
    subresource = f"/{about['subresource']}" if "subresource" in about else ""
    return about.get("apiGroup", ""), about["resource"] + subresource, event["verb"]


def used(log: Path, user: str) -> set[Grant]:
    """Return every right that the user used.

    A server-side apply that created an object needs `create` in addition to patch.
    """
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
    """Return the messages of requests denied for lack of a right, not for a policy, a quota or a dying namespace."""
    refused = [event for event in requests(log, user) if event["responseStatus"]["code"] == 403]
    return [
        event["responseStatus"].get("message", "")
        for event in refused
        if " cannot " in event["responseStatus"].get("message", " cannot ")
    ]


def namespaces(log: Path, user: str) -> set[str]:
    """Return the namespaces of the user's requests; "" stands for the whole cluster."""
    return {event["objectRef"].get("namespace", "") for event in requests(log, user)}


def granted(roles: list[dict[str, Any]]) -> set[Grant]:
    """Return every right that roles grant."""
    rules = [rule for role in roles for rule in role["rules"]]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
