"""The pod that mounts a claim for `grpo cp`: as the pods of a job would, for as long as it is asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.cluster.copying import folder
from grpo_operator.api import names
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest
from grpo_operator.layout.pods import SECURITY, pod_template
from grpo_operator.layout.topology import plan_topology
from grpo_spec.lenient import mapping, mappings

Object = Mapping[str, Any]

LABELS = {names.LABEL_MANAGED_BY: "grpo-cli", "app.kubernetes.io/component": "copy"}
SELECTOR = ",".join(f"{key}={value}" for key, value in LABELS.items())
ROOT, PORT = "/claim", 8731
IDLE_SECONDS = 600
"""The pod ends when nobody has asked for so long: the other side was switched off."""
MOST_SECONDS = 12 * 3600
"""The pod ends after this time in any case; the next copy goes on where it was."""
_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
"""A quota may demand them; what is read and written goes through few megabytes."""
_OF_JOB = ("securityContext", "imagePullSecrets", "serviceAccountName", "tolerations")
"""Fields of a job's pods that the pod gets too: with these, the job's user can read the claim."""


def copy_pod(claim: str, like: tuple[Manifest, Manifest] | None, image: str | None, holder: Object | None) -> Manifest:
    """Return the pod that serves a claim.

    Args:
        claim: its name.
        like: the template's spec of a job's pods, and their container; None to do without.
        image: for --image; else the job's, else the release's.
        holder: a pod on whose node it must run, see `holder_of`.
    """
    spec, container = like or ({"securityContext": SECURITY}, {})
    taken = {key: spec[key] for key in _OF_JOB if key in spec}
    if holder is not None:
        on_node = {"key": "metadata.name", "operator": "In", "values": [holder["spec"]["nodeName"]]}
        terms = {"nodeSelectorTerms": [{"matchFields": [on_node]}]}
        taken["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        taken["tolerations"] = [*mappings(holder["spec"].get("tolerations"))]
    program = Path(folder.__file__).read_text()
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "grpo-cp-", "labels": LABELS},
        "spec": taken
        | {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": MOST_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [
                {
                    "name": names.CONTAINER,
                    "image": image or container.get("image") or names.DEFAULT_IMAGE,
                    **({"imagePullPolicy": container["imagePullPolicy"]} if container and image is None else {}),
                    "command": ["python", "-c", program, ROOT, str(PORT), str(IDLE_SECONDS)],
                    "resources": _RESOURCES,
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [{"name": "claim", "mountPath": ROOT}],
                }
            ],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


def like_job(job: Job | None) -> tuple[Manifest, Manifest] | None:
    """Return the spec of the pods of a job's first group, and their container; None if its spec is not valid."""
    if job is None:
        return None
    spec = pod_template(job, plan_topology(job).groups[0], 0)["spec"]
    return spec, spec["containers"][0]


def job_of(claim: str, jobs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest job that mounts a claim, else the newest of all, else None."""
    by_age = sorted(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"]), reverse=True)
    mounts = (job for job in by_age if any(mapping(job["spec"].get(key)).get("claimName") == claim for key in _CLAIMS))
    return next(mounts, next(iter(by_age), None))


_CLAIMS = ("storage", "cache")


def holder_of(claim: Object, pods: Sequence[Object]) -> Object | None:
    """Return the pod that keeps the claim on its node; None if there is none, or the claim can be on several."""
    if {"ReadWriteMany", "ReadOnlyMany"} & set(claim["spec"]["accessModes"]):
        return None
    return next((pod for pod in pods if _is_on_node(pod) and _mounts(pod, claim["metadata"]["name"])), None)


def _is_on_node(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName")) and mapping(pod.get("status")).get("phase") in ("Pending", "Running")


def _mounts(pod: Object, claim: str) -> bool:
    volumes = mappings(pod["spec"].get("volumes"))
    return any(mapping(volume.get("persistentVolumeClaim")).get("claimName") == claim for volume in volumes)
