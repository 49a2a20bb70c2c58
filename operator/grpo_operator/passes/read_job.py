"""A job as the operator understands it, from its object."""

from __future__ import annotations

from grpo_operator.api import names
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.site import Layers, queue_of
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import StoredSpec, read_spec
from grpo_operator.layout.job import Job, Queue
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.transport import Object
from grpo_spec.lenient import mapping, text


def queue_label(raw: Object) -> str:
    """Return the queue that the job names, or ""."""
    return text(mapping(raw["metadata"].get("labels")).get(names.LABEL_QUEUE))


def read_job(
    key: Key,
    raw: Object,
    status: GRPOJobStatus,
    stored: StoredSpec | None = None,
    requests: PodRequests | None = None,
    layers: Layers | None = None,
) -> Job:
    """Return a job as the operator understands it.

    `stored` is its spec if that was read before with these `layers`, `requests` what its pods request unless it has
    begun with others.
    """
    layers = (status.site or {}) if layers is None else layers
    stored = stored or read_spec(raw["spec"], status, layers, queue_label(raw))
    labels = mapping(raw["metadata"].get("labels"))
    queue = queue_of(queue_label(raw), layers)
    return Job(
        namespace=key.namespace,
        name=key.name,
        uid=key.uid,
        generation=raw["metadata"]["generation"],
        spec=stored.spec,
        fault=stored.fault,
        site=layers,
        refused=stored.refused,
        ignored=stored.ignored,
        micro_batch_halvings=status.micro_batch_halvings,
        queue=Queue(queue, text(labels.get(names.LABEL_QUEUE_PRIORITY)) or None) if queue else None,
        admission=status.admission,
        requests=status.pod_requests or (requests if status.attempt is None else None),
    )
