"""The Job that downloads a job's model and datasets into the cache before its first attempt. Pure."""

from __future__ import annotations

from typing import Any

from grpo_operator.api import names
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.pods import Manifest, child_labels, pod_template
from grpo_operator.layout.topology import Job, Topology
from grpo_spec.contract import DatasetName, Downloads
from grpo_spec.gpus import bytes_of_node
from grpo_spec.reports import ExitCode

RETRIES = 20
"""Number of times that a download is tried again; the wait doubles from 10 s to 6 minutes, so for about 1.5 hours."""

_OF_GPU_NODES = (
    *("nodeSelector", "affinity", "topologySpreadConstraints"),
    *("resourceClaims", "schedulingGroup", "runtimeClassName"),
)
MOST_CHARACTERS = 65_536
"""Of a contract in the pod's command: Linux takes 131,072 bytes. Larger jobs are planned when they start."""
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
    """Return the Job. Its pod is like one of the first group, with its tokens, but asks for no GPU and no GPU node.

    Kubernetes replaces a pod whose node is lost, and retries one that failed unless the hub does not have the model.
    """
    template = pod_template(job, topology.groups[0], 0)
    role = {names.LABEL_ROLE: names.ROLE_DOWNLOAD, "app.kubernetes.io/component": names.ROLE_DOWNLOAD}
    of_attempts = (names.LABEL_GROUP, names.LABEL_ATTEMPT)
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key not in of_attempts} | role
    pod = {key: value for key, value in template["spec"].items() if key not in _OF_GPU_NODES}
    (container,) = pod["containers"]
    container = {key: value for key, value in container.items() if key not in ("resources", "readinessProbe", "ports")}
    wanted = wanted_downloads(job).model_copy(update=_to_plan(job, topology))
    container["command"] = [
        *("python", "-m", "grpo_workload.download_pod"),
        wanted.model_dump_json(by_alias=True, exclude_none=True),
    ]
    container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] not in _VOLUMES]
    pod["containers"] = [container]
    pod["volumes"] = [one for one in pod["volumes"] if one["name"] not in _VOLUMES]
    pod |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    metadata = {
        "name": names.download_name(job.name),
        "namespace": job.namespace,
        "labels": child_labels(job) | role,
        "ownerReferences": [job.owner],
    }
    wrong = {"containerName": names.CONTAINER, "operator": "In", "values": [int(ExitCode.CONFIG_ERROR)]}
    lost = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": lost},
                    {"action": "FailJob", "onExitCodes": wrong},
                ]
            },
            "template": {"metadata": template["metadata"] | {"labels": labels}, "spec": pod},
        },
    }


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
    if len(known) < len(sizes) or len(contract.model_dump_json()) > MOST_CHARACTERS:
        return {}
    return {"contract": contract, "gpu_bytes": min(known)}
