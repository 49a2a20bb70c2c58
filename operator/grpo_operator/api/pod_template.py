"""Pod settings that users may change, and merging a group's over the job's like a strategic merge patch. Pure.

Fields have the names and types of Kubernetes'. What is an object there, or a list of objects, may have any form here;
the dry run of the StatefulSet checks it. With Kubernetes' schemas of these fields the CRD would be half as large again,
even without descriptions, and the API server would remove what only a newer Kubernetes knows, also from stored jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from grpo_operator.api.faults import explain
from grpo_spec.contract import RESERVED_ENV, RESERVED_PREFIXES, is_reserved
from grpo_spec.schema import WITHOUT_RULES, ObjectName, Rule, Section

Object = dict[Annotated[str, Field(max_length=253)], JsonValue]
LabelMap = dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]]
TextMap = dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=4096)]]
Objects = Annotated[tuple[Object, ...], Field(max_length=64)]


def list_map(key: str) -> dict[str, JsonValue]:
    """Return a schema extension: the list is a map by `key`.

    Server-side apply merges by it; the API server keeps it unique.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class EnvVar(Section):
    """An environment variable of the container, as in a pod."""

    RULES = (
        Rule(
            f"!(self.name in [{', '.join(repr(name) for name in sorted(RESERVED_ENV))}]) && "
            + " && ".join(f"!self.name.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES),
            "the operator and the launcher set this variable, as "
            f"{', '.join([*sorted(RESERVED_ENV), *(f'{prefix}*' for prefix in RESERVED_PREFIXES)])}; "
            "remove or rename it",
            lambda e: not is_reserved(e.name),
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the environment variable.")
    value: Annotated[str, Field(max_length=32768)] | None = Field(None, description="Value of the variable.")
    value_from: Object | None = Field(
        None,
        description="Source of the value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef. Set it for "
        "credentials.",
    )


class PodTemplate(Section):
    """Pod settings.

    The operator itself sets the container's name, command and GPU limit and its own environment variables.
    """

    labels: LabelMap = Field(
        default_factory=dict,
        max_length=64,
        description="More labels of the pod. Set it where other programs choose pods by labels.",
    )
    annotations: TextMap = Field(
        default_factory=dict,
        max_length=64,
        description="More annotations of the pod. Set it where other programs read them.",
    )
    node_selector: LabelMap = Field(
        default_factory=dict,
        max_length=64,
        description="Labels that the pod's node must have. Set it to choose a kind of GPU or a pool of nodes.",
    )
    tolerations: Objects = Field(
        (), description="Taints that the pod tolerates, as in a pod. Set it where nodes with GPUs have taints."
    )
    affinity: Object = Field(
        default_factory=dict,
        description="Affinity and anti-affinity, as in a pod. Set it for what nodeSelector cannot say.",
    )
    topology_spread_constraints: Objects = Field(
        (),
        description="How pods spread over nodes or racks, as in a pod; without a labelSelector it counts the job's "
        "own. Set it where the loss of one rack should not take all engines.",
    )
    scheduler_name: ObjectName | None = Field(
        None,
        description="Scheduler of the pod; default: Kubernetes' own. Set it where GPUs have their own, such as Volcano "
        "or KAI.",
    )
    priority_class_name: ObjectName | None = Field(
        None, description="PriorityClass of the pod. Set it where jobs compete for GPUs."
    )
    runtime_class_name: ObjectName | None = Field(
        None,
        description="RuntimeClass of the pod. Set it, for example nvidia, where NVIDIA's runtime is not the default.",
    )
    service_account_name: ObjectName | None = Field(
        None,
        description="Service account of the pod; its token is not mounted. Set it where rights hang on it, as "
        "OpenShift's SCCs.",
    )
    image_pull_secrets: Objects = Field(
        (),
        description="Secrets for pulling the image, as in a pod: [{name: ...}]. Set it for images of a private "
        "registry.",
    )
    security_context: Object = Field(
        default_factory=dict,
        description="The pod's security context. Set it where the image or a volume needs another user: it overrides "
        "user, group and fsGroup 65532, runAsNonRoot, seccomp RuntimeDefault.",
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = Field(
        (), description="Environment variables of the container.", json_schema_extra=list_map("name")
    )
    env_from: Objects = Field(
        (),
        description="ConfigMaps and Secrets whose keys become environment variables, as in a pod; the operator's and "
        "those of `env` win. Set it for credentials of several variables.",
    )
    resources: Object = Field(
        default_factory=dict,
        description="Requests and limits, as in a pod; `gpus` of the group sets those for GPUs. What neither "
        "sets of cpu and memory is requested as jobs.requests of the operator's chart: 1 and 4Gi for each GPU.",
    )
    volumes: Objects = Field(
        (),
        description="More volumes, as in a pod. Set it for data, models or code of your own. A job with a "
        "hostPath, or projected tokens or certificates of its service account, stays Invalid unless the operator's "
        "chart allows them.",
    )
    volume_mounts: Objects = Field(
        (), description="More volume mounts of the container, as in a pod. Set it with `volumes`."
    )
    init_containers: Objects = Field(
        (),
        description="Containers that end before the job's own starts; sidecars with restartPolicy Always. Set it to "
        "fetch files, or for a proxy. They have no capabilities unless their securityContext says so; `privileged` and "
        "`hostNetwork` hold for them too.",
    )
    host_network: bool = Field(
        False,
        description="true: the pod has the network and the ports of its node, and no NetworkPolicy holds for it. Set "
        "it where the fast network is only the node's. Such a job is Invalid unless the operator's chart sets "
        "jobs.allowHostNetwork.",
    )
    privileged: bool = Field(
        False,
        description="true: the container is privileged; most uses need runAsUser 0 and runAsNonRoot false in "
        "securityContext. Set it where devices have no device plugin. Such a job is Invalid unless the operator's "
        "chart sets jobs.allowPrivileged.",
    )
    termination_grace_period_seconds: int | None = Field(
        None,
        ge=1,
        le=86400,
        description="Seconds to save a checkpoint after SIGTERM; default: 300.",
    )


class GroupSpec(Section):
    """Pods of one kind; each group becomes a StatefulSet."""

    name: Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the group, unique in the job; its pods are called <job>-<group>-<ordinal>."
    )
    replicas: int = Field(1, ge=1, le=4096, description="Number of pods in the group.")
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate,
        description="Pod settings of this group, merged over spec.podTemplate like a strategic merge patch.",
    )


class GpuGroup(GroupSpec):
    """Pods of one kind, with GPUs."""

    gpus: int = Field(ge=1, le=64, description="Number of GPUs of each pod.")
    resource_claim_template_name: ObjectName | None = Field(
        None,
        description="ResourceClaimTemplate that asks for the GPUs of each pod, `gpus` of them: dynamic resource "
        "allocation, in place of device.resourceName. Set it where a DRA driver publishes the cluster's GPUs, and to "
        "choose GPUs by their attributes.",
    )


MERGE_KEYS = {
    "env": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""Merge keys, as Kubernetes publishes them. Other lists (tolerations, envFrom) are replaced, as in Kubernetes."""


def merge(base: PodTemplate, over: PodTemplate) -> PodTemplate:
    """Merge `over` over `base`: a field that `over` does not set keeps the value of `base`, a null removes it.

    Nothing in the result is null. Raises ValueError if it breaks a limit, such as that of the number of volumes.
    """
    lower = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
    upper = over.model_dump(mode="json", by_alias=True, exclude_unset=True)
    try:
        # Rules were checked where the spec was read: a job that has begun may break newer ones.
        return PodTemplate.model_validate(_without_nulls(_merge_maps(lower, upper)), context=WITHOUT_RULES)
    except ValidationError as error:
        raise ValueError(f"merged over spec.podTemplate: {explain(error, PodTemplate, 'podTemplate')}") from error


def _merge_maps(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge_maps(below, value)
        elif isinstance(value, list) and isinstance(below, list) and key in MERGE_KEYS:
            merged[key] = _merge_lists(below, value, MERGE_KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_lists(lower: Iterable[Any], upper: Iterable[Any], key: str) -> list[Any]:
    """Return the items of both lists; of two with the same key the upper one. Items without a key are all kept: the API
    server says what it thinks of them.
    """
    merged: dict[object, Any] = {}
    for number, item in enumerate([*lower, *upper]):
        name = item.get(key) if isinstance(item, dict) else None
        merged[name if isinstance(name, str) else number] = item
    return list(merged.values())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value if one is not None] if isinstance(value, list) else value
