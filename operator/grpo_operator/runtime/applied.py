"""Whether a child is in force as applied, so that a pass over a job that nothing changes writes nothing.

An API server leaves out some of what it gets (false, "" and empty lists of most fields), writes quantities in its own
way ("1000m" becomes "1"), and webhooks add to lists. What it makes of a manifest is therefore remembered from its
answer: as long as the object looks like that, applying the same manifest again changes nothing. An operator that starts
remembers nothing, and applies such children once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from grpo_operator.api import names

Object = Mapping[str, Any]

REMEMBERED = 100_000
"""Number of objects that are remembered, at some 200 bytes each; of more, those applied first are forgotten."""


class Applied:
    """Remembers what the API server made of manifests that it did not store as they were, by the object's UID."""

    def __init__(self) -> None:
        self._made: dict[str, bytes] = {}

    def is_in_force(self, manifest: Object, live: Object) -> bool:
        """Whether applying the manifest would not change the object, or must not."""
        if live.get("immutable") or manifest.get("kind") == names.GANG_KIND or _is_its_contract(manifest, live):
            return True  # a running attempt keeps its contract and its PodGroup, as an earlier release wrote them
        return contains(live, manifest) or self._made.get(live["metadata"]["uid"]) == _digest(manifest, live)

    def remember(self, manifest: Object, answer: Object) -> None:
        """Remember the API server's answer to the application of a manifest."""
        self._made.pop(answer["metadata"]["uid"], None)
        if contains(answer, manifest):
            return
        self._made[answer["metadata"]["uid"]] = _digest(manifest, answer)
        if len(self._made) > REMEMBERED:
            del self._made[next(iter(self._made))]


def _is_its_contract(manifest: Object, live: Object) -> bool:
    """Whether the object has the contract of the manifest's attempt, not that of an earlier one in the same pods."""
    attempts = [one["metadata"].get("labels", {}).get(names.LABEL_ATTEMPT) for one in (manifest, live)]
    return manifest.get("kind") == "ConfigMap" and attempts[0] == attempts[1]


def _digest(manifest: Object, live: Object) -> bytes:
    """Return a hash of a manifest and of an object, without what other controllers write: its status, annotations."""
    metadata = {key: live["metadata"].get(key) for key in ("labels", "ownerReferences")}
    rest = {key: value for key, value in live.items() if key not in ("apiVersion", "kind", "metadata", "status")}
    text = json.dumps([manifest, metadata, rest], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def contains(live: Any, wanted: Any) -> bool:
    """Whether every field of `wanted` has that value in `live`, which may have more fields: the API server adds
    defaults.

    Lists must be equal element by element.
    """
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and contains(live[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(live, list) and len(live) == len(wanted) and all(map(contains, live, wanted))
    return bool(live == wanted) and isinstance(live, bool) == isinstance(wanted, bool)
