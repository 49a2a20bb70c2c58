"""Every name that other programs see: API group, labels, conditions, reasons and the names of children."""

from __future__ import annotations

from enum import StrEnum

GROUP = "training.grpo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GRPOJob"
PLURAL = "grpojobs"

MANAGER = "grpo-operator"
"""Field manager of server-side apply, and the value of `app.kubernetes.io/managed-by`."""

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_ROLE = f"{GROUP}/role"
LABEL_GROUP = f"{GROUP}/group"
LABEL_EPOCH = f"{GROUP}/epoch"
SELECTOR_MANAGED = f"{LABEL_MANAGED_BY}={MANAGER}"

CONTROLLER = f"{GROUP}/{MANAGER}"
"""Value of `spec.managedBy` that means this operator; others keep it away (KEP-4368)."""

CONTAINER = "grpo"

PATHS = {
    KIND: f"/apis/{API_VERSION}/namespaces/{{}}/{PLURAL}",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Pod": "/api/v1/namespaces/{}/pods",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Node": "/api/v1/nodes",
}
"""Where the API server has each kind, with a place for the namespace."""


DEFAULT_IMAGE = "ghcr.io/grpo-operator/workload:0.1.0"

MAX_CHILD_NAME = 52
"""A StatefulSet's pods carry the label controller-revision-hash, `<name>-<10 characters>`, of at most 63 (kubernetes#64023)."""


class Role(StrEnum):
    """What a pod does."""

    TRAINER = "trainer"
    GENERATION = "generation"


class Condition(StrEnum):
    """Types of `status.conditions`, in the order in which they are listed."""

    ACCEPTED = "Accepted"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    HUNG = "Hung"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of conditions and events."""

    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    INVALID_POD_TEMPLATE = "InvalidPodTemplate"
    NAME_TAKEN = "NameTaken"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CLAIM_NOT_SHARED = "ClaimNotReadWriteMany"
    WAITING_FOR_OLD_CHILDREN = "WaitingForOldChildren"
    WAITING_FOR_PODS = "WaitingForPods"
    ALL_PODS_SCHEDULED = "AllPodsScheduled"
    UNSCHEDULABLE = "Unschedulable"
    CONTAINER_WAITING = "ContainerWaiting"
    STARTING = "Starting"
    NODE_NOT_READY = "NodeNotReady"
    WAITING_FOR_ENGINES = "WaitingForEngines"
    WAITING_FOR_PEERS = "WaitingForPeers"
    ALL_RANKS_RUNNING = "AllRanksRunning"
    FINISHED = "Finished"
    TRAINING_DONE = "TrainingDone"
    POD_REPLACED = "PodReplaced"
    OUTCOME_LOST = "OutcomeLost"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    STOPPED = "Stopped"
    HUNG = "Hung"
    RESTARTING = "Restarting"
    RESTARTED = "Restarted"
    ENGINE_RESTARTING = "EngineRestarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    STEPPING = "Stepping"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    RESTARTS_FROM_STEP_ZERO = "RestartsFromStepZero"


def child_name(job: str, group: str) -> str:
    """Name of a group's StatefulSet; its pods are `<child>-<ordinal>`."""
    return f"{job}-{group}"


def contract_name(job: str, epoch: int) -> str:
    """Name of the immutable ConfigMap that holds an epoch's contract."""
    return f"{job}-{epoch}"


def policy_name(job: str) -> str:
    """Name of the job's NetworkPolicy."""
    return job


def pod_host(pod: str, job: str, namespace: str) -> str:
    """DNS name of a pod below the job's headless Service; without the cluster's domain, which only the pods' resolver knows."""
    return f"{pod}.{job}.{namespace}.svc"
