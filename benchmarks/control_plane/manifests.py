"""One job of two pod groups as each side describes it. The pods are the same: the operator's own pod template. Pure."""

from __future__ import annotations

from typing import Any

from grpo_operator.api.spec import parse_spec
from grpo_operator.layout import manifests
from grpo_operator.layout.job import Job
from grpo_operator.layout.pods import pod_template
from grpo_operator.layout.topology import Topology, plan_topology
from support.control_plane.operators import ended_container, make_job, outcome

Manifest = dict[str, Any]
Shape = tuple[int, int]
"""Pods of the first group and of the second one."""

SIZE_OF_NAME = 8


def job_name(number: int) -> str:
    """Return the name of a job; names of its pods begin with it."""
    return f"job-{number:04d}"


def job_of(pod: str) -> str:
    """Return the name of the job that a pod belongs to."""
    return pod[:SIZE_OF_NAME]


def grpojob(name: str, shape: Shape) -> list[Manifest]:
    """Return a GRPOJob that may restart often, without back-off."""
    groups = [{"name": group, "replicas": pods, "gpus": 1} for group, pods in zip("ab", shape, strict=True)]
    return [make_job(name, trainer={"groups": groups}, failurePolicy={"backoffSeconds": 0, "maxRestarts": 100})]


def bare(name: str, shape: Shape) -> list[Manifest]:
    """Return what the operator makes of that job, except the NetworkPolicy, as objects without an owner."""
    job, topology = planned(name, shape)
    objects = [manifests.service(job), manifests.contract_map(job, topology, 0, 0)]
    objects += [manifests.statefulset(job, group, 0) for group in topology.groups]
    for one in objects:
        del one["metadata"]["ownerReferences"], one["metadata"]["namespace"]
    return objects


def jobset(name: str, shape: Shape) -> list[Manifest]:
    """Return a JobSet of two Jobs, with the defaults that JobSet's webhook would set."""
    job, topology = planned(name, shape)
    jobs = []
    for group in topology.groups:
        template = pod_template(job, group, 0)
        template["spec"]["restartPolicy"] = "Never"  # as pods of Jobs need it
        count = {"parallelism": group.spec.replicas, "completions": group.spec.replicas, "completionMode": "Indexed"}
        spec = count | {"backoffLimit": 0, "template": template}
        jobs.append({"name": group.name, "replicas": 1, "groupName": "default", "template": {"spec": spec}})
    spec = {
        "replicatedJobs": jobs,
        "successPolicy": {"operator": "All"},
        "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}]


def leader_worker_set(name: str, shape: Shape) -> list[Manifest]:
    """Return a LeaderWorkerSet of one group, with the defaults that LWS's webhook would set.

    A group has one leader: so has the first group of the shape.
    """
    job, topology = planned(name, shape)
    spec = {
        "replicas": 1,
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0, "partition": 0},
        },
        "leaderWorkerTemplate": {
            "size": sum(shape),
            "restartPolicy": "RecreateGroupOnPodRestart",
            "workerTemplate": pod_template(job, topology.groups[0], 0),
        },
    }
    return [
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": name},
            "spec": spec,
        }
    ]


def failed_rank() -> Manifest:
    """Return the change of a pod's status by which a kubelet reports that a rank failed."""
    return ended_container(70, outcome(70, "RankFailed", "killed"))


def planned(name: str, shape: Shape) -> tuple[Job, Topology]:
    """Return that job as the operator understands it, without a namespace and a UID of its own."""
    (made,) = grpojob(name, shape)
    job = Job(namespace="", name=name, uid=name, generation=1, spec=parse_spec(made["spec"]))
    return job, plan_topology(job)
