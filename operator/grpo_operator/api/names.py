"""Names that other programs see: API group, labels, conditions and the names of children."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

GROUP = "training.grpo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GRPOJob"
PLURAL = "grpojobs"

DEFAULTS_KINDS = ("GRPOClusterDefaults", "GRPODefaults")
"""Kinds of what a site sets for its jobs: in the whole cluster, and in a namespace."""
DEFAULTS_NAME = "default"
"""Name of the one object of each that counts."""

MANAGER = "grpo-operator"
"""Field manager of server-side apply, and value of `app.kubernetes.io/managed-by`."""

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_ROLE = f"{GROUP}/role"
LABEL_GROUP = f"{GROUP}/group"
LABEL_ATTEMPT = f"{GROUP}/attempt"
ANNOTATION_ATTEMPT = LABEL_ATTEMPT
"""On a pod that is kept: the attempt that begins in it. Its label has the attempt that it was created for."""
SELECTOR_MANAGED = f"{LABEL_MANAGED_BY}={MANAGER}"

CONTROLLER = f"{GROUP}/{MANAGER}"
"""Value of `spec.managedBy` that means this operator; it leaves jobs with another value alone (KEP-4368)."""

CONTAINER = "grpo"

ROLE_DOWNLOAD = "download"
"""Value of the role's label for the Job that downloads, and its pod; neither belongs to an attempt."""

PATHS = {
    KIND: f"/apis/{API_VERSION}/namespaces/{{}}/{PLURAL}",
    "GRPOClusterDefaults": f"/apis/{API_VERSION}/grpoclusterdefaults",
    "GRPODefaults": f"/apis/{API_VERSION}/namespaces/{{}}/grpodefaults",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "PodGroup": "/apis/scheduling.k8s.io/v1beta1/namespaces/{}/podgroups",
    "Workload": "/apis/kueue.x-k8s.io/v1beta2/namespaces/{}/workloads",
    "ResourceFlavor": "/apis/kueue.x-k8s.io/v1beta2/resourceflavors",
    "WorkloadPriorityClass": "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Pod": "/api/v1/namespaces/{}/pods",
    "ResourceClaimTemplate": "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Node": "/api/v1/nodes",
}
"""API path of each kind, with a placeholder for the namespace."""

OLDER_PATHS = {"PodGroup": "/apis/scheduling.k8s.io/v1alpha2/namespaces/{}/podgroups"}
"""Paths in clusters that do not serve the newer version: that of Kubernetes 1.36."""

WATCHED_KINDS = ("Pod", "StatefulSet", "Service", "NetworkPolicy", "ConfigMap", "Job")
"""Kinds of which the operator watches all objects that carry its label."""

GANG_KIND = "PodGroup"
"""Also watched where the API server serves it: pods of one PodGroup get their nodes together, or none."""

QUEUE_KIND = "Workload"
"""Also watched where the API server serves it: what Kueue admits. It is created before the first attempt."""

LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
"""Labels of a job, as of all that Kueue admits: its LocalQueue, and its WorkloadPriorityClass if it has one."""

OPTIONAL_KINDS = (GANG_KIND, QUEUE_KIND)

KINDS_OF_AN_ATTEMPT = ("ConfigMap", GANG_KIND)
"""Kinds of children that each attempt has its own of, its contract and its PodGroup. Attempts in the same
pods share them."""

CHILD_KINDS = ("Service", "NetworkPolicy", "ConfigMap", "StatefulSet")
"""Kinds of objects that the operator creates for every job, and deletes when the job no longer needs them."""

DEFAULT_IMAGE = "ghcr.io/grpo-operator/workload:0.1.0"

MAX_CHILD_NAME = 52
"""Longest name of a StatefulSet: its pods carry the label controller-revision-hash, `<name>-<10 characters>`, and a
label has at most 63 characters (kubernetes#64023)."""

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_FORM = "metadata.name must start with a letter and contain only a-z, 0-9 and -: a Service gets this name"


def api_version(kind: str, paths: Mapping[str, str] = PATHS) -> str:
    """Return the apiVersion of a kind: "apps/v1"."""
    path = paths[kind].removeprefix("/apis/").removeprefix("/api/")
    return (path.partition("/namespaces/") if "/namespaces/" in path else path.rpartition("/"))[0]


def plural(kind: str) -> str:
    """Return the name of a kind in paths: "statefulsets"."""
    return PATHS[kind].rpartition("/")[2]


class Role(StrEnum):
    """Role of a pod; those of generation are called engine pods."""

    TRAINER = "trainer"
    GENERATION = "generation"
    ENVIRONMENT = "environment"


class Condition(StrEnum):
    """Types of `status.conditions`, in the order in which they are listed."""

    ACCEPTED = "Accepted"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    HUNG = "Hung"
    DEGRADED = "Degraded"
    BLOCKED = "Blocked"
    COMPLETE = "Complete"
    FAILED = "Failed"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


def child_name(job: str, group: str) -> str:
    """Return the name of a group's StatefulSet; its pods are `<child>-<ordinal>`."""
    return f"{job}-{group}"


def name_fault(job: str, groups: Iterable[str]) -> str | None:
    """Return why children of a job and its pod groups cannot have their names, or None. The CRD has the same rules."""
    if not re.fullmatch(NAME_PATTERN, job):
        return NAME_FORM
    long = next((group for group in groups if len(child_name(job, group)) > MAX_CHILD_NAME), None)
    return None if long is None else too_long(long)


def too_long(group: str) -> str:
    """Say that the name of a group's StatefulSet is too long."""
    return (
        f"metadata.name and the name of the group {group} must have at most {MAX_CHILD_NAME - 1} characters together: "
        "the StatefulSet is called <job>-<group>; shorten one"
    )


def pod_group_name(job: str, attempt: int) -> str:
    """Return the name of the PodGroup of an attempt, whose pods find nodes together; its size cannot change."""
    return f"{job}-{attempt}"


def contract_name(job: str, attempt: int) -> str:
    """Return the name of the immutable ConfigMap that holds an attempt's contract."""
    return f"{job}-{attempt}"


def download_name(job: str) -> str:
    """Return the name of the Job that downloads before the first attempt."""
    return f"{job}-download"


def policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy of the job's pods, without those of engines."""
    return job


def engine_policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy of the engine pods. No job has this name: theirs have no dots."""
    return f"{job}.engines"


def environment_policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy of the environment pods."""
    return f"{job}.environments"


def environment_map_name(job: str, group: str) -> str:
    """Return the name of the ConfigMap that the pods of an environment group read. No contract has a dot."""
    return f"{job}.{group}"


def pod_host(pod: str, job: str, namespace: str) -> str:
    """Return a pod's DNS name below the headless Service, without the cluster's domain: only pods can resolve it."""
    return f"{pod}.{job}.{namespace}.svc"
