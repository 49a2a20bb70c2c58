"""The Job that downloads a job's model and datasets into the cache before its first attempt. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from grpo_operator.api import names
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest, child_labels
from grpo_operator.layout.pods import pod_template
from grpo_operator.layout.topology import Topology
from grpo_spec.contract import DatasetName, Downloads
from grpo_spec.gpus import bytes_of_node
from grpo_spec.lenient import mapping

MOST_MEMORY = "8Gi"
_LIMITS = {"cpu": "4", "memory": MOST_MEMORY}
_REQUESTS = {"cpu": "500m", "memory": "2Gi"}
"""Requests of the pod: a quota or a LimitRange may demand it. Less where podTemplate says less."""

_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate(("m", "", "k", "M", "G", "T", "P"), start=-1)} | {
    f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTP", start=1)
}

_OF_GPU_NODES = (
    *("nodeSelector", "affinity", "topologySpreadConstraints"),
    *("resourceClaims", "schedulingGroup", "runtimeClassName"),
)
MOST_BYTES = 65_536
"""Size of the largest contract that stands in the pod's command, of which Linux takes 131,072 bytes. Jobs with a larger
one are planned when they start."""
_VOLUMES = ("contract", "data", "state", "shm")


def wanted_downloads(job: Job) -> Downloads:
    """Return what the hub has of a job: model and datasets by name."""
    spec = job.spec
    sets = [spec.dataset, *([spec.evaluation.dataset] if spec.evaluation else [])]
    return Downloads(
        model=spec.model.name,
        revision=spec.model.revision if spec.model.name else None,
        datasets=tuple(
            DatasetName(name=one.name, config=one.config, revision=one.revision, split=one.split)
            for one in sets
            if one.name is not None
        ),
        status_port=spec.rendezvous.status_port,
    )


def download_job(job: Job, topology: Topology) -> Manifest:
    """Return the Job, which is one try. Its pod is like one of the first group, with its tokens, but asks for no GPU
    and no GPU node. Kubernetes replaces a pod whose node is lost; the operator decides on one that failed.
    """
    template = pod_template(job, topology.groups[0], 0)
    role = {names.LABEL_ROLE: names.ROLE_DOWNLOAD, "app.kubernetes.io/component": names.ROLE_DOWNLOAD}
    of_attempts = (names.LABEL_GROUP, names.LABEL_ATTEMPT)
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key not in of_attempts} | role
    pod = {key: value for key, value in template["spec"].items() if key not in _OF_GPU_NODES}
    (container,) = pod["containers"]
    container = {key: value for key, value in container.items() if key not in ("readinessProbe", "ports")}
    container["resources"] = _resources(container["resources"])
    wanted = wanted_downloads(job).model_copy(update=_to_plan(job, topology))
    container["command"] = [
        *("python", "-m", "grpo_workload.download_pod"),
        wanted.model_dump_json(by_alias=True, exclude_none=True),
    ]
    container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] not in _VOLUMES]
    pod["containers"] = [container]
    if "initContainers" in pod:  # what those prepare elsewhere, only ranks and engines read
        pod["initContainers"] = [
            one
            for one in pod["initContainers"]
            if not any(mount.get("name") in _VOLUMES for mount in one.get("volumeMounts") or ())
        ]
    pod["volumes"] = [one for one in pod["volumes"] if one["name"] not in _VOLUMES]
    pod |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    metadata = {
        "name": names.download_name(job.name),
        "namespace": job.namespace,
        "labels": child_labels(job) | role,
        "ownerReferences": [job.owner],
    }
    lost = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": lost}]},
            "template": {"metadata": template["metadata"] | {"labels": labels}, "spec": pod},
        },
    }


def _resources(of_trainer: Mapping[str, Any]) -> Manifest:
    """Return the requests and limits of the pod that downloads: small ones, and no more than a trainer pod's."""
    theirs = {kind: mapping(of_trainer.get(kind)) for kind in ("limits", "requests")}
    limits = {name: _least(own, theirs["limits"].get(name)) for name, own in _LIMITS.items()}
    requests = {name: _least(own, theirs["requests"].get(name), limits[name]) for name, own in _REQUESTS.items()}
    resources = {"limits": limits, "requests": requests}
    for kind, said in theirs.items():  # which a quota may demand too; what is downloaded goes into the claim
        if "ephemeral-storage" in said:
            resources[kind]["ephemeral-storage"] = _least("2Gi", said["ephemeral-storage"])
    return resources


def _least(own: str, *others: object) -> str:
    """Return the smallest of these amounts that are understood; others are the API server's to refuse."""
    known = [(amount, str(said)) for said in (own, *others) if (amount := _amount(said)) is not None]
    return min(known)[1]


def _amount(said: object) -> Decimal | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", str(said))
    return Decimal(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else None


def _to_plan(job: Job, topology: Topology) -> dict[str, Any]:
    """Return what the pod needs to plan whether the job fits: nothing if its node selectors do not say the GPUs."""
    selectors = [
        pod_template(job, group, 0)["spec"].get("nodeSelector") or {}
        for group in topology.groups
        if group.role == names.Role.TRAINER
    ]
    sizes = [bytes_of_node(selector) for selector in selectors]
    known = [size for size in sizes if size is not None]
    contract = make_contract(job, topology, 0)
    if len(known) < len(sizes) or len(contract.model_dump_json().encode()) > MOST_BYTES:
        return {}
    return {"contract": contract, "gpu_bytes": min(known)}
