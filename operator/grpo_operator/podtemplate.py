"""What of a pod users set, and laying one template over another as users of strategic merge patch expect. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, JsonValue

from grpo_workload.contract import RESERVED_ENV
from grpo_workload.section import Name, Rule, Section

Object = dict[Annotated[str, Field(max_length=253)], JsonValue]
LabelMap = dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]]
TextMap = dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=4096)]]
Objects = Annotated[tuple[Object, ...], Field(max_length=64)]


def list_map(key: str) -> dict[str, JsonValue]:
    """Schema extension: the list is a map by `key`, which server-side apply merges by and the API server keeps unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class EnvVar(Section):
    """A variable of the container, as in a pod."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the variable.")
    value: Annotated[str, Field(max_length=32768)] | None = Field(None, description="Its value.")
    value_from: Object | None = Field(None, description="Source of its value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef.")


class PodTemplate(Section):
    """What of a pod users set; container name, command, GPU limit and reserved variables belong to the operator."""

    RULES = (
        Rule(
            f"!has(self.env) || self.env.all(e, !(e.name in [{', '.join(repr(name) for name in sorted(RESERVED_ENV))}]))",
            f"env must not set the operator's own variables: {', '.join(sorted(RESERVED_ENV))}",
            lambda t: not any(e.name in RESERVED_ENV for e in t.env),
        ),
    )

    labels: LabelMap = Field(default_factory=dict, max_length=64, description="Further labels of the pod.")
    annotations: TextMap = Field(default_factory=dict, max_length=64, description="Further annotations of the pod.")
    node_selector: LabelMap = Field(default_factory=dict, max_length=64, description="Labels a node must have.")
    tolerations: Objects = Field((), description="Taints the pod tolerates.")
    affinity: Object = Field(default_factory=dict, description="Affinity, as in a pod.")
    priority_class_name: Name | None = Field(None, description="PriorityClass of the pod.")
    service_account_name: Name | None = Field(None, description="Service account; its token is not mounted.")
    image_pull_secrets: Objects = Field((), description="Secrets for pulling the image.")
    security_context: Object = Field(
        default_factory=dict, description="The pod's security context, laid over the default: non-root 65532, seccomp RuntimeDefault."
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = Field(
        (), description="Variables of the container.", json_schema_extra=list_map("name")
    )
    env_from: Objects = Field((), description="ConfigMaps and Secrets whose keys become variables.")
    resources: Object = Field(default_factory=dict, description="Requests and limits, as in a pod; the GPU limit is the group's `gpus`.")
    volumes: Objects = Field((), description="Further volumes.")
    volume_mounts: Objects = Field((), description="Further mounts of the container.")
    termination_grace_period_seconds: int | None = Field(
        None, ge=1, le=86400, description="Time to save a checkpoint after SIGTERM; 300 by default."
    )


class PodGroup(Section):
    """Pods of one kind: one StatefulSet."""

    name: Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the group, unique in the job."
    )
    replicas: int = Field(1, ge=1, le=4096, description="Pods of the group.")
    gpus: int = Field(ge=1, le=64, description="GPUs of each pod: its limit.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="Laid over spec.podTemplate for this group.")


_KEYS = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name"}
"""Merge keys, from k8s.io/api/core/v1's patchMergeKey tags; lists not named here (tolerations, envFrom) are replaced, as there."""


def merge(base: PodTemplate, over: PodTemplate) -> PodTemplate:
    """`over` laid over `base`: what `over` leaves unset stays as in `base`."""
    lower = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
    upper = over.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return PodTemplate.model_validate(_merge_maps(lower, upper))


def _merge_maps(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge_maps(below, value)
        elif isinstance(value, list) and isinstance(below, list) and key in _KEYS:
            merged[key] = _merge_lists(below, value, _KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_lists(lower: Iterable[dict[str, Any]], upper: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    merged = {item[key]: item for item in lower}
    for item in upper:
        merged[item[key]] = item
    return list(merged.values())
