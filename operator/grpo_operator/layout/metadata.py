"""Labels and metadata of a job's children. Pure."""

from __future__ import annotations

from typing import Any

from grpo_operator.api import names
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job

Manifest = dict[str, Any]


def child_labels(
    job: Job, *, attempt: int | None = None, group: Group | None = None, user: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the labels of a child: those of all children, over them the user's for this one, over all the operator's.

    Those of its attempt and group only if given.
    """
    labels = (
        job.spec.common_labels
        | (user or {})
        | {
            "app.kubernetes.io/name": "grpojob",
            "app.kubernetes.io/instance": job.name,
            names.LABEL_MANAGED_BY: names.MANAGER,
            names.LABEL_JOB: job.name,
            names.LABEL_JOB_UID: job.uid,
        }
    )
    if attempt is not None:
        labels[names.LABEL_ATTEMPT] = str(attempt)
    if group is not None:
        role = group.role.value
        labels |= {"app.kubernetes.io/component": role, names.LABEL_ROLE: role, names.LABEL_GROUP: group.name}
    return labels


def metadata(job: Job, name: str, *, attempt: int | None = None, group: Group | None = None) -> Manifest:
    """Return the metadata of a child."""
    annotations = job.spec.common_annotations
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": child_labels(job, attempt=attempt, group=group),
        **({"annotations": annotations} if annotations else {}),
        "ownerReferences": [job.owner],
    }
