"""A site's settings for its jobs: read for a job that is to begin, and judged whenever they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.site import REQUIRED, Layers
from grpo_operator.api.site_objects import find_fault, layer
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.api.times import rfc3339, whole_seconds
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.complaints import Complaints
from grpo_operator.runtime.errors import ConflictError
from grpo_operator.runtime.transport import Object
from grpo_spec.lenient import mapping, mappings
from grpo_spec.reasons import Reason

log = logging.getLogger(__name__)

VALID = "Valid"
"""Type of the condition."""

CRD_SECONDS = 2.0
"""Seconds in which the API server serves these kinds, if it got their CRDs with that of jobs."""

RETRY_SECONDS = 15.0
"""Seconds until an object is judged again of which the API server did not take the condition."""


async def read_layers(cluster: Cluster, kinds: Sequence[str], namespace: str) -> Layers:
    """Return the layers of a namespace's jobs, read live: a job begins with what was there before it. A kind without a
    CRD has no objects.
    """
    found = await asyncio.gather(*(cluster.get(kind, namespace, names.DEFAULTS_NAME) for kind in kinds))
    return {kind: layer(raw) for kind, raw in zip(kinds, found, strict=True) if raw is not None}


async def say_what_is_absent(cluster: Cluster, kinds: Sequence[str]) -> None:
    """Say which of these kinds have no CRD. Jobs have the values of their objects as soon as there is one."""
    if await _absent(cluster, kinds):
        await asyncio.sleep(CRD_SECONDS)
    if absent := await _absent(cluster, kinds):
        crds = (
            "kubectl apply --server-side -f crds/; an operator that starts after that says of each whether it is valid"
        )
        log.warning("the cluster has no CRD of %s, by which a site sets defaults: %s", " and ".join(absent), crds)


async def _absent(cluster: Cluster, kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds if not await cluster.serves(kind)]


class Judge:
    """Says of each object whether it is valid: jobs meet a fault only when they begin.

    `changed` is called with the namespace of an object, "" for one of the cluster, when what it sets changes.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], datetime], changed: Callable[[str], None]) -> None:
        self._cluster, self._clock, self._tell = cluster, clock, changed
        self._objects: dict[str, Object] = {}  # by UID
        self._changed = asyncio.Event()
        self._complaints = Complaints(log)

    def take_in(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the watches."""
        raw, metadata = event["object"], event["object"]["metadata"]
        old = self._objects.pop(metadata["uid"], None)
        if event["type"] != "DELETED":
            self._objects[metadata["uid"]] = raw
            self._changed.set()
            if old is not None and old["metadata"]["generation"] == metadata["generation"]:
                return  # its status
        self._tell(metadata.get("namespace", ""))

    async def run(self) -> None:
        """Judge all objects, and again those that change. Never ends."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for raw in list(self._objects.values()):
                try:
                    await self._judge(raw)
                except ConflictError:
                    continue  # the newer one is on its way
                except Exception as error:  # whatever it is, a later try may do
                    what = f"{raw['kind']} {raw['metadata']['name']}"
                    self._complaints.say(what, "the condition Valid of %s was not written: %s", what, error)
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed.set)

    async def _judge(self, raw: Object) -> None:
        fault, metadata = find_fault(mapping(raw.get("spec"))), raw["metadata"]
        now = whole_seconds(self._clock())
        status, reason = ("False", Reason.INVALID_SPEC) if fault else ("True", Reason.VALID)
        message = fault or "jobs that begin from now on have these values"
        # Not a fault: where these values break a rule, a job may set the one that is missing.
        if not fault and (refused := read_spec(REQUIRED, GRPOJobStatus(), {raw["kind"]: layer(raw)}).refused):
            message = f"jobs that set no more than they must are refused: {refused}"
        new = {
            "type": VALID,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": metadata["generation"],
        }
        old = next(iter(mappings(mapping(raw.get("status")).get("conditions"))), {})
        if {name: one for name, one in old.items() if name != "lastTransitionTime"} == new:
            return
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        conditions = [new | {"lastTransitionTime": since or rfc3339(now)}]
        await self._cluster.patch_status(raw["kind"], metadata, {"conditions": conditions})
        if fault and old.get("message") != fault:
            await self._cluster.emit(raw, kind="Warning", reason=reason, message=fault, now=now)
