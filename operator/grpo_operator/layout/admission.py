"""What a valid spec may still not ask for: names that Kubernetes refuses, access that the administrator does not allow.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_operator.api import names
from grpo_operator.api.pod_template import PodTemplate
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.layout.topology import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the chart's values allow in podTemplate beyond its defaults."""

    host_path: bool = False
    service_account_token: bool = False


def find_fault(job: Job, allowed: Allowed) -> str | None:
    """Return why this job may not run, naming the field and what would work, or None."""
    groups = [group.name for group in job.spec.pod_groups]
    return names.name_fault(job.name, groups) or next(_forbidden(job.spec, allowed), None)


def _forbidden(spec: GRPOJobSpec, allowed: Allowed) -> Iterator[str]:
    for path, template in _templates(spec):
        for number, volume in enumerate(template.volumes):
            where = f"{path}.volumes[{number}]"
            if volume.get("hostPath") is not None and not allowed.host_path:
                why = "pods of jobs may not mount folders of their node; use a claim"
                yield f"{where}.hostPath: {why}, or ask for jobs.allowHostPath in the operator's chart"
            projected = volume.get("projected")
            sources = projected.get("sources") if isinstance(projected, dict) else None
            for index, source in enumerate(sources if isinstance(sources, list) else ()):
                for kind in ("serviceAccountToken", "podCertificate"):
                    held = isinstance(source, dict) and source.get(kind) is not None
                    if held and not allowed.service_account_token:
                        why = "pods of jobs hold no credentials of their service account, as they run users' code"
                        cure = "leave it out, or ask for jobs.allowServiceAccountToken in the operator's chart"
                        yield f"{where}.projected.sources[{index}].{kind}: {why}; {cure}"


def _templates(spec: GRPOJobSpec) -> Iterator[tuple[str, PodTemplate]]:
    """Yield every podTemplate of the spec with its path."""
    yield "spec.podTemplate", spec.pod_template
    for number, group in enumerate(spec.trainer.groups):
        yield f"spec.trainer.groups[{number}].podTemplate", group.pod_template
    for number, engines in enumerate(spec.generation.server.groups if spec.generation.server else ()):
        yield f"spec.generation.server.groups[{number}].podTemplate", engines.pod_template
