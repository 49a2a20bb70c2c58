"""Faults of a valid spec: names that Kubernetes refuses, access that the administrator does not allow.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_operator.api import names
from grpo_operator.api.pod_template import PodTemplate
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.layout.job import Job
from grpo_operator.layout.queueing import MAX_POD_SETS
from grpo_spec.lenient import mapping, mappings


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Permissions of the chart's values for podTemplate beyond its defaults, and abilities of the cluster."""

    host_path: bool = False
    host_network: bool = False
    privileged: bool = False
    service_account_token: bool = False
    gang: bool = False  # the API server serves PodGroups
    queue: bool = False  # and Workloads


_PATH = "pods of jobs may not mount folders of their node; use a claim, or ask for jobs.allowHostPath"
_NETWORK = "pods of jobs may not use the network of their node; leave it out, or ask for jobs.allowHostNetwork"
_PRIVILEGED = "pods of jobs may have no rights on their node; leave it out, or ask for jobs.allowPrivileged"
_TOKEN = (
    "pods of jobs hold no credentials of their service account, as they run users' code; leave it out, or ask for "
    "jobs.allowServiceAccountToken"
)


_GANG = (
    "spec.scheduling.gang Native: when the operator started, the API server did not serve PodGroups "
    f"({names.api_version(names.GANG_KIND)} or {names.api_version(names.GANG_KIND, names.OLDER_PATHS)}); switch gang "
    "scheduling on (docs/gpus-and-networks.md) and restart the operator, or leave gang out"
)


_QUEUE = (
    f"metadata.labels[{names.LABEL_QUEUE}]: when the operator started, the API server did not serve Kueue's Workloads "
    f"({names.api_version(names.QUEUE_KIND)}); install Kueue and restart the operator, or remove the label"
)
_TOO_MANY = (
    f"metadata.labels[{names.LABEL_QUEUE}]: Kueue admits at most {MAX_POD_SETS} groups together; "
    "join some, or remove the label"
)

_NOTHING_TO_RESUME = (
    "spec.storage.resumeFrom: pods have no storage that could hold that run; set storage.claimName to its claim"
)


def find_fault(job: Job, allowed: Allowed) -> str | None:
    """Return why this job may not run, naming the field and what would work, or None."""
    groups = [group.name for group in job.spec.pod_groups]
    if job.queue is not None and not allowed.queue:
        return _QUEUE
    if job.queue is not None and len(groups) > MAX_POD_SETS:
        return _TOO_MANY
    if job.spec.storage.resume_from is not None and job.spec.storage.claim_name is None:
        return _NOTHING_TO_RESUME
    return names.name_fault(job.name, groups) or next(_forbidden(job.spec, allowed), None)


def _forbidden(spec: GRPOJobSpec, allowed: Allowed) -> Iterator[str]:
    if spec.scheduling.gang is not None and not allowed.gang:
        yield _GANG
    needs_leave = {
        _PATH: allowed.host_path,
        _NETWORK: allowed.host_network,
        _PRIVILEGED: allowed.privileged,
        _TOKEN: allowed.service_account_token,
    }
    for path, template in _templates(spec):
        for field, why in _reaches(template):
            if not needs_leave[why]:
                yield f"{path}.{field}: {why} in the operator's chart"


def _reaches(template: PodTemplate) -> Iterator[tuple[str, str]]:
    """Yield each field by which pods reach their node or hold credentials, and what is said where that is not allowed.

    Values of the wrong form are left to the API server.
    """
    if template.host_network:
        yield "hostNetwork", _NETWORK
    if template.privileged:
        yield "privileged", _PRIVILEGED
    for number, container in enumerate(template.init_containers):
        where, context = f"initContainers[{number}]", mapping(container.get("securityContext"))
        if context.get("privileged"):
            yield f"{where}.securityContext.privileged", _PRIVILEGED
        if mapping(context.get("capabilities")).get("add"):
            yield f"{where}.securityContext.capabilities.add", _PRIVILEGED
        for index, port in enumerate(mappings(container.get("ports"))):
            if port.get("hostPort"):
                yield f"{where}.ports[{index}].hostPort", _NETWORK
    for number, volume in enumerate(template.volumes):
        if volume.get("hostPath") is not None:
            yield f"volumes[{number}].hostPath", _PATH
        for index, source in enumerate(mappings(mapping(volume.get("projected")).get("sources"))):
            for kind in ("serviceAccountToken", "podCertificate"):
                if source.get(kind) is not None:
                    yield f"volumes[{number}].projected.sources[{index}].{kind}", _TOKEN


def _templates(spec: GRPOJobSpec) -> Iterator[tuple[str, PodTemplate]]:
    """Yield every podTemplate of the spec with its path."""
    yield "spec.podTemplate", spec.pod_template
    for number, group in enumerate(spec.trainer.groups):
        yield f"spec.trainer.groups[{number}].podTemplate", group.pod_template
    for number, engines in enumerate(spec.generation.server.groups if spec.generation.server else ()):
        yield f"spec.generation.server.groups[{number}].podTemplate", engines.pod_template
    for number, served in enumerate(spec.environment_pods.groups if spec.environment_pods else ()):
        yield f"spec.environmentPods.groups[{number}].podTemplate", served.pod_template
