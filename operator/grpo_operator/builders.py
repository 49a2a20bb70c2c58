"""Topology -> Service, ConfigMap, StatefulSets: plain dicts, equal for equal input. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_operator import names
from grpo_operator.fabric import fabric_environment, rdma_resources
from grpo_operator.names import Role
from grpo_operator.podtemplate import PodTemplate, merge
from grpo_operator.topology import Group, Job, Topology, make_contract
from grpo_workload import contract as c
from grpo_workload.section import dump

Manifest = dict[str, Any]

SAVE_SECONDS = 300
"""Default grace: a checkpoint of a 7B model with its optimizer takes a minute or two on network storage."""

_UID = 65532


def manifests(job: Job, topology: Topology, epoch: int, avoid: Sequence[str] = (), *, policies: bool = True) -> list[Manifest]:
    """Every child of an epoch, in the order in which they are applied; its pods keep away from the nodes `avoid` if they can."""
    guard = [network_policy(job)] if policies else []
    shared = [service(job), *guard, contract_map(job, topology, epoch)]
    return [*shared, *(statefulset(job, group, epoch, avoid) for group in topology.groups)]


def service(job: Job) -> Manifest:
    """The headless Service of all pods; addresses are published before pods are ready, or the rendezvous could never begin."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: job.uid},
            "ports": [{"name": name, "port": port, "protocol": "TCP", "targetPort": port} for name, port in _ports(job).items()],
        },
    }


def network_policy(job: Job) -> Manifest:
    """Only a job's own pods reach its pods, but for the launchers' read-only status port: vLLM's weight updates know no password."""
    own = {"podSelector": {"matchLabels": {names.LABEL_JOB_UID: job.uid}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, names.policy_name(job.name)),
        "spec": {
            "podSelector": own["podSelector"],
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"ports": [{"port": job.spec.rendezvous.status_port, "protocol": "TCP"}]},
            ],
        },
    }


def _ports(job: Job) -> dict[str, int]:
    """Names and numbers of the ports that the Service and the containers tell of."""
    ports = {"rendezvous": job.spec.rendezvous.port, "status": job.spec.rendezvous.status_port}
    generation = job.spec.generation.server or job.spec.generation.node_local
    return ports | ({"engine": generation.port, "transfer": generation.transfer_port} if generation else {})


def contract_map(job: Job, topology: Topology, epoch: int) -> Manifest:
    """The contract of an epoch. Immutable: a pod that reads it late reads what the others read."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, names.contract_name(job.name, epoch), epoch=epoch),
        "immutable": True,
        "data": {"contract.json": make_contract(job, topology, epoch).model_dump_json(by_alias=True, exclude_none=True, indent=1)},
    }


def statefulset(job: Job, group: Group, epoch: int, avoid: Sequence[str] = ()) -> Manifest:
    """One group's StatefulSet: Parallel, or a rendezvous of all would wait for ordinal 0's readiness for ever (kubernetes#67250)."""
    selector = {names.LABEL_JOB_UID: job.uid, names.LABEL_GROUP: group.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(job, group.statefulset, epoch=epoch, group=group),
        "spec": {
            "replicas": group.spec.replicas,
            "serviceName": job.name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector},
            "template": pod_template(job, group, epoch, avoid),
        },
    }


def pod_template(job: Job, group: Group, epoch: int, avoid: Sequence[str] = ()) -> Manifest:
    """The pod of a group: the operator's part, with the user's laid over it where the two may meet."""
    user = merge(job.spec.pod_template, group.spec.pod_template)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The launcher is not process 1 then, for which the kernel drops signals that it does not handle yet: a pod deleted while its
        # container starts would keep its GPUs for the whole grace. Orphans of the ranks are reaped too.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": user.termination_grace_period_seconds or SAVE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _UID,
            "runAsGroup": _UID,
            "fsGroup": _UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        | user.security_context,
        "containers": [_container(job, group, user)],
        "volumes": [*_volumes(job, epoch), *user.volumes],
    }
    optional = {
        "nodeSelector": user.node_selector,
        "tolerations": list(user.tolerations),
        "affinity": _affinity(user.affinity, avoid),
        "priorityClassName": user.priority_class_name,
        "serviceAccountName": user.service_account_name,
        "imagePullSecrets": list(user.image_pull_secrets),
    }
    spec |= {key: value for key, value in optional.items() if value}
    labels = user.labels | _labels(job, epoch=epoch, group=group)
    return {"metadata": {"labels": labels, **({"annotations": user.annotations} if user.annotations else {})}, "spec": spec}


def _affinity(user: dict[str, Any], avoid: Sequence[str]) -> Manifest:
    """The user's, and a preference for other nodes than those that were lost: never a rule, one may be the only node with 7 GPUs."""
    if not avoid:
        return user
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid)}
    node = dict(user.get("nodeAffinity", {}))
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    node[key] = [*node.get(key, ()), {"weight": 100, "preference": {"matchExpressions": [away]}}]
    return {**user, "nodeAffinity": node}


def _container(job: Job, group: Group, user: PodTemplate) -> Manifest:
    trains = group.role is Role.TRAINER
    module = "grpo_workload.launch" if trains else "grpo_workload.engine_process"
    probe = {"path": "/readyz", "port": "status"} if trains else {"path": "/health", "port": "engine"}
    container: Manifest = {
        "name": names.CONTAINER,
        "image": job.spec.image,
        "imagePullPolicy": job.spec.image_pull_policy,
        "command": ["python", "-m", module],
        "env": list({variable["name"]: variable for variable in [*_environment(job), *map(dump, user.env)]}.values()),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _ports(job).items()],
        "readinessProbe": {"httpGet": {**probe, "scheme": "HTTP"}, "periodSeconds": 2, "failureThreshold": 3},
        "resources": _resources(job, group, user),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": _capabilities(job)},
        "terminationMessagePath": c.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*_mounts(job), *user.volume_mounts],
    }
    return container | ({"envFrom": list(user.env_from)} if user.env_from else {})


def _capabilities(job: Job) -> Manifest:
    """RDMA registers memory, which locks it; without RDMA the pod passes the policy `restricted`."""
    return {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if job.spec.network.rdma_resource else {})


def _environment(job: Job) -> list[Manifest]:
    return [
        _field(c.ENV_POD_NAME, "metadata.name"),
        _field(c.ENV_POD_UID, "metadata.uid"),
        {"name": c.ENV_CONTRACT, "value": c.CONTRACT_PATH},
        {"name": c.ENV_STATE_DIR, "value": c.STATE_DIR},
        {"name": c.ENV_DATA_DIR, "value": c.DATA_DIR},
        {"name": c.ENV_TERMINATION_LOG, "value": c.TERMINATION_LOG},
        {"name": "HF_HOME", "value": c.CACHE_DIR},
        {"name": "HOME", "value": "/tmp"},
        *fabric_environment(job.spec.network),
    ]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _resources(job: Job, group: Group, user: PodTemplate) -> Manifest:
    resources: Manifest = dict(user.resources)
    extended = rdma_resources(job.spec.network)
    if job.spec.device.resource:
        extended[job.spec.device.resource] = str(group.spec.gpus)
    for kind in ("limits", "requests") if extended else ():
        resources[kind] = {**resources.get(kind, {}), **extended}
    return resources


def _volumes(job: Job, epoch: int) -> list[Manifest]:
    return [
        {"name": "contract", "configMap": {"name": names.contract_name(job.name, epoch), "defaultMode": 0o444}},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "data", **_storage(job.spec.storage.claim_name)},
        {"name": "cache", **_storage(job.spec.cache.claim_name)},
    ]


def _storage(claim: str | None) -> Manifest:
    return {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}


def _mounts(job: Job) -> list[Manifest]:
    sub_path = job.spec.storage.sub_path
    return [
        {"name": "contract", "mountPath": "/etc/grpo", "readOnly": True},
        {"name": "state", "mountPath": c.STATE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "data", "mountPath": c.DATA_DIR} | ({"subPath": sub_path} if sub_path else {}),
        {"name": "cache", "mountPath": c.CACHE_DIR},
    ]


def _labels(job: Job, *, epoch: int | None = None, group: Group | None = None) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "grpojob",
        "app.kubernetes.io/instance": job.name,
        names.LABEL_MANAGED_BY: names.MANAGER,
        names.LABEL_JOB: job.name,
        names.LABEL_JOB_UID: job.uid,
    }
    if epoch is not None:
        labels[names.LABEL_EPOCH] = str(epoch)
    if group is not None:
        role = group.role.value
        labels |= {"app.kubernetes.io/component": role, names.LABEL_ROLE: role, names.LABEL_GROUP: group.name}
    return labels


def _metadata(job: Job, name: str, *, epoch: int | None = None, group: Group | None = None) -> Manifest:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": _labels(job, epoch=epoch, group=group),
        "ownerReferences": [job.owner],
    }
