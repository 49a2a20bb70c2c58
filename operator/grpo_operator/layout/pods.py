"""Build the pod template of a group: the operator's settings with the user's merged in. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.api.pod_template import PodTemplate, merge
from grpo_operator.layout.affinity import affinity, inner, own_pods
from grpo_operator.layout.fabric import fabric_environment, rdma_resources
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest, child_labels
from grpo_operator.layout.volumes import mounts, volumes
from grpo_spec import contract as c
from grpo_spec.contract import Device
from grpo_spec.schema import dump

SAVE_SECONDS = 300
"""Default grace period: saving a 7B model with its optimizer takes a minute or two on network storage."""

CLAIM = "gpus"
"""Name of the resource claim in pods: that of the group's ResourceClaimTemplate."""

_PROGRAMS = {
    Role.TRAINER: ("grpo_workload.trainer_pod", {"path": "/readyz", "port": "status"}),
    Role.GENERATION: ("grpo_workload.engine_pod", {"path": "/health", "port": "engine"}),
    Role.ENVIRONMENT: ("grpo_workload.environment_pod", {"path": "/ready", "port": "environment"}),
}
"""The program of each role's pods, and what says that it is ready."""

_GRACE_SECONDS = {Role.TRAINER: SAVE_SECONDS, Role.GENERATION: SAVE_SECONDS, Role.ENVIRONMENT: 30}

_UID = 65532
SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": _UID,
    "runAsGroup": _UID,
    "fsGroup": _UID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The security context of pods, but for what the user's settings say."""


def pod_template(job: Job, group: Group, attempt: int, avoid: Sequence[str] = ()) -> Manifest:
    """Return the pod template of a group: the operator's settings with those of the user merged in.

    Raises ValueError if the user's settings do not have the form of a pod's.
    """
    user = pod_settings(job, group)
    serves = group.role is Role.ENVIRONMENT
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # With it the launcher is not process 1, to which the kernel delivers no signal that it does not handle yet: a
        # pod deleted while its container starts would keep its GPUs for the whole grace period. It also reaps orphans
        # of the ranks.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": user.termination_grace_period_seconds or _GRACE_SECONDS[group.role],
        "securityContext": SECURITY | user.security_context,
        "containers": [_container(job, group, user)],
        "volumes": [*volumes(job, group, user, attempt), *user.volumes],
    }
    claim = group.claim_template
    optional = {
        "nodeSelector": user.node_selector,
        "tolerations": list(user.tolerations),
        "affinity": affinity(job, group, user.affinity, avoid),
        "topologySpreadConstraints": [
            {"labelSelector": own_pods(job, group), **one} for one in user.topology_spread_constraints
        ],
        "schedulerName": user.scheduler_name,
        "priorityClassName": user.priority_class_name,
        "runtimeClassName": user.runtime_class_name,
        "initContainers": [_init_container(one) for one in user.init_containers],
        "hostNetwork": user.host_network,
        # The default would ask the node's resolver, which does not know the names of pods.
        "dnsPolicy": "ClusterFirstWithHostNet" if user.host_network else None,
        "resourceClaims": [{"name": CLAIM, "resourceClaimTemplateName": claim}] if claim else None,
        "schedulingGroup": {"podGroupName": names.pod_group_name(job.name, attempt)} if group.in_gang else None,
        "serviceAccountName": user.service_account_name,
        "imagePullSecrets": list(user.image_pull_secrets),
    }
    spec |= {key: value for key, value in optional.items() if value}
    labels = child_labels(job, attempt=None if serves else attempt, group=group, user=user.labels)
    annotations = job.spec.common_annotations | user.annotations
    return {"metadata": {"labels": labels} | ({"annotations": annotations} if annotations else {}), "spec": spec}


def pod_settings(job: Job, group: Group) -> PodTemplate:
    """Return the user's pod settings of a group: those of the job with the group's own merged in.

    Environment pods run what the model asks for. Of the job's settings, which may hold credentials, and what only nodes
    with GPUs have, they get the secrets for pulling the image alone, which no container sees.

    Raises ValueError if a limit is broken.
    """
    base = job.spec.pod_template
    if group.role is Role.ENVIRONMENT:
        base = PodTemplate(image_pull_secrets=base.image_pull_secrets)
    return merge(base, group.spec.pod_template)


def _container(job: Job, group: Group, user: PodTemplate) -> Manifest:
    module, probe = _PROGRAMS[group.role]
    serves = group.role is Role.ENVIRONMENT
    ports = environment_ports(job) if serves else port_numbers(job)
    container: Manifest = {
        "name": names.CONTAINER,
        "image": job.spec.image,
        "imagePullPolicy": job.spec.image_pull_policy,
        "command": ["python", "-m", module],
        "env": _environment(job, group, user),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "readinessProbe": {"httpGet": {**probe, "scheme": "HTTP"}, "periodSeconds": 2, "failureThreshold": 3},
        "resources": _resources(job, group, user),
        "securityContext": {"privileged": True}
        if user.privileged
        else {"allowPrivilegeEscalation": False, "capabilities": _capabilities(job, group)},
        "terminationMessagePath": c.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts(job, group, user), *user.volume_mounts],
    }
    return container | ({"envFrom": list(user.env_from)} if user.env_from else {})


def _init_container(user: Manifest) -> Manifest:
    """Return a container of the user's with what the policy `restricted` asks for, where the user says nothing else."""
    said = inner(user, "securityContext", dict, "initContainers")
    restricted = (
        {} if said.get("privileged") else {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    )
    return {**user, "securityContext": restricted | said}


def _capabilities(job: Job, group: Group) -> Manifest:
    """Return the capabilities: none (policy `restricted`), or with RDMA that to lock the memory that it registers."""
    locks = job.spec.network.rdma_resource and group.role is not Role.ENVIRONMENT
    return {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if locks else {})


def _environment(job: Job, group: Group, user: PodTemplate) -> list[Manifest]:
    """Return the container's variables. The user's win, but for those by which a pod knows who it is.

    Kubernetes takes these over what `envFrom` has.
    """
    ours = [
        _field(c.ENV_POD_NAME, "metadata.name"),
        _field(c.ENV_POD_UID, "metadata.uid"),
        {"name": c.ENV_CONTRACT, "value": c.CONTRACT_PATH},
        {"name": c.ENV_TERMINATION_LOG, "value": c.TERMINATION_LOG},
        {"name": "HOME", "value": "/tmp"},
        *(() if group.role is Role.ENVIRONMENT else _of_ranks_and_engines(job)),
    ]
    # Not all that admission refuses: a job that began before it did keeps what does no harm.
    kept = {variable["name"] for variable in ours if c.is_reserved(variable["name"])} | c.RESERVED_ENV
    theirs = [dump(one) for one in user.env if one.name not in kept and not one.name.startswith("PET_")]
    return list({variable["name"]: variable for variable in [*ours, *theirs]}.values())


def _of_ranks_and_engines(job: Job) -> list[Manifest]:
    return [
        {"name": c.ENV_STATE_DIR, "value": c.STATE_DIR},
        {"name": c.ENV_DATA_DIR, "value": c.DATA_DIR},
        {"name": "HF_HOME", "value": c.CACHE_DIR},
        # The library datasets writes what it prepares, and locks, beside the files that it reads.
        *([{"name": "HF_DATASETS_CACHE", "value": "/tmp/datasets"}] if job.spec.cache.read_only else ()),
        *fabric_environment(job.spec.network),
    ]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _resources(job: Job, group: Group, user: PodTemplate) -> Manifest:
    resources: Manifest = dict(user.resources)
    serves = group.role is Role.ENVIRONMENT
    extended = {} if serves else rdma_resources(job.spec.network)
    if group.claim_template:
        resources["claims"] = [*inner(user.resources, "claims", list, "resources"), {"name": CLAIM}]
    elif job.spec.device.resource and not serves:
        extended[job.spec.device.resource] = str(group.gpus)
    said = {kind: inner(user.resources, kind, dict, "resources") for kind in ("limits", "requests")}
    for kind, values in said.items():
        if merged := values | extended:
            resources[kind] = merged
    if job.requests is not None:  # of what has a limit alone, Kubernetes requests as much
        gpus = group.gpus if job.spec.device.type is Device.CUDA else 0
        asked = {
            key: value for key, value in job.requests.of_pod(gpus).items() if not any(key in s for s in said.values())
        }
        if asked:
            resources["requests"] = asked | resources.get("requests", {})
    return resources


def port_numbers(job: Job) -> dict[str, int]:
    """Return the ports of trainer and engine pods, by name."""
    ports = {"rendezvous": job.spec.rendezvous.port, "status": job.spec.rendezvous.status_port}
    generation = job.spec.generation.server or job.spec.generation.node_local
    return ports | ({"engine": generation.port, "transfer": generation.transfer_port} if generation else {})


def environment_ports(job: Job) -> dict[str, int]:
    """Return the ports of environment pods, by name; none if the job has no such pods."""
    return {"environment": c.ENVIRONMENT_PORT} if job.spec.environment_pods else {}


APP_PROTOCOLS = {"status": "http", "engine": "http", "environment": "http"}
"""The protocol of a port, for service meshes, which would guess; on the others it is a protocol of torch's own."""
