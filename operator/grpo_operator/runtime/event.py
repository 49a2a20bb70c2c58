"""Events of Kubernetes about what the operator does. Pure."""

from __future__ import annotations

from datetime import datetime

from grpo_operator.api import names
from grpo_operator.runtime.transport import Object
from grpo_spec.lenient import clip


def make_event(about: Object, *, kind: str, reason: str, message: str, now: datetime) -> Object:
    """Return the event's manifest about a job, or an object of the cluster."""
    metadata = about["metadata"]
    regarding = {
        "apiVersion": names.API_VERSION,
        "kind": about.get("kind", names.KIND),
        **{name: metadata[name] for name in ("name", "namespace") if name in metadata},
    }
    namespace = metadata.get("namespace", "default")  # where Kubernetes has events about objects of the cluster
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}-", "namespace": namespace},
        "eventTime": now.isoformat(timespec="microseconds"),
        "action": "Reconcile",
        "reason": reason,
        "note": clip(message, 1024),  # the API server's limit, in bytes
        "type": kind,
        "regarding": regarding | {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        "reportingController": f"{names.GROUP}/{names.MANAGER}",
        "reportingInstance": names.MANAGER,
    }
