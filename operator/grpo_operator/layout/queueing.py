"""The Workload by which a job asks Kueue for quota, and what Kueue's admission adds to its pods. Pure.

This is what Kueue's own integrations do (pkg/controller/jobframework/reconciler.go, pkg/podset/podset.go): one Workload
with a pod set for each group, so all groups are admitted together or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.placement_status import Admission, GroupAdmission
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest, child_labels
from grpo_operator.layout.pods import pod_template
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import mapping, mappings

_KUEUE = "kueue.x-k8s.io"
MAX_POD_SETS = 18
"""Most pod sets of a Workload."""

_OF_CONTAINERS = ("name", "image", "resources", "restartPolicy")
_OF_PODS = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "schedulerName",
    "priorityClassName",
    "runtimeClassName",
    "resourceClaims",
)
"""Fields for Kueue. Nothing else is in a Workload: what a new release of the operator changes in pods must not
make it another one, for which the job would have to wait again."""


def workload(job: Job, topology: Topology) -> Manifest:
    """Return the Workload of the job as it is now, without its priority. Another request has another name: that of a
    Workload that has quota cannot change.

    Raises ValueError if the user's settings do not have the form of a pod's.
    """
    assert job.queue is not None
    spec = {
        "queueName": job.queue.name,
        "podSets": [_pod_set(job, group) for group in (*topology.groups, *topology.environment_groups)],
    }
    request = json.dumps([job.uid, job.queue.priority_class, spec], sort_keys=True)
    return {
        "apiVersion": names.api_version(names.QUEUE_KIND),
        "kind": names.QUEUE_KIND,
        "metadata": {
            "name": f"{job.name}-{hashlib.sha256(request.encode()).hexdigest()[:8]}",
            "namespace": job.namespace,
            "labels": child_labels(job) | {f"{_KUEUE}/job-uid": job.uid},
            "ownerReferences": [job.owner],
        },
        "spec": spec,
    }


def wanted_name(job: Job, topology: Topology) -> str | None:
    """Return the name of the Workload of the job as it is now; None without a queue, and if pods cannot be built."""
    try:
        return None if job.queue is None else str(workload(job, topology)["metadata"]["name"])
    except ValueError:
        return None


def _pod_set(job: Job, group: Group) -> Manifest:
    pod = pod_template(replace(job, admission=None), group, 0)["spec"]
    kept = {key: pod[key] for key in _OF_PODS if key in pod}
    for kind in ("initContainers", "containers"):
        if pod.get(kind):
            kept[kind] = [{key: one[key] for key in _OF_CONTAINERS if key in one} for one in pod[kind]]
    scheduling = job.spec.scheduling
    near: Manifest = {}
    if scheduling.topology_key is not None and group.role is not names.Role.ENVIRONMENT:
        near = {
            "topologyRequest": {
                scheduling.topology_policy.lower(): scheduling.topology_key,
                "podIndexLabel": "apps.kubernetes.io/pod-index",
            }
        }
    # Elastic engines come and go without asking again: quota is for as many as there may be.
    return {"name": group.name, "count": group.max_replicas or group.spec.replicas, "template": {"spec": kept}} | near


def flavors(found: Mapping[str, Any]) -> set[str]:
    """Return the names of the resource flavors that a Workload was given."""
    return {str(name) for one in _assignments(found) for name in mapping(one.get("flavors")).values()}


def read_admission(found: Mapping[str, Any], made: Mapping[str, Mapping[str, Any]]) -> Admission:
    """Return what a Workload's admission adds to the pods. `made`: the ResourceFlavors that it names."""
    metadata, status = found["metadata"], mapping(found.get("status"))
    checks = mappings(status.get("admissionChecks"))
    updates = [update for check in checks for update in mappings(check.get("podSetUpdates"))]
    asked = {one["name"]: mapping(one.get("topologyRequest")) for one in found["spec"]["podSets"]}
    return Admission(
        workload=metadata["name"],
        uid=metadata["uid"],
        cluster_queue=mapping(status.get("admission")).get("clusterQueue", ""),
        groups=tuple(
            _group(metadata["name"], one, asked.get(one["name"], {}), made, updates) for one in _assignments(found)
        ),
    )


def _group(
    owner: str,
    assigned: Mapping[str, Any],
    asked: Mapping[str, Any],
    made: Mapping[str, Mapping[str, Any]],
    updates: list[Mapping[str, Any]],
) -> GroupAdmission:
    """Return what is added to the pods of one pod set, by its flavors and by admission checks."""
    name, gated = assigned["name"], assigned.get("topologyAssignment") is not None
    flavored = [mapping(made[one].get("spec")) for one in sorted(set(mapping(assigned.get("flavors")).values()))]
    annotations = {f"{_KUEUE}/workload": owner}
    if gated:  # by these Kueue knows pods whose place it chooses
        kind = next((kind for kind in ("required", "preferred") if asked.get(kind)), "unconstrained")
        annotations[f"{_KUEUE}/podset-{kind}-topology"] = asked.get(kind, "true")
    labels = {f"{_KUEUE}/podset": name}
    selector: Manifest = {}
    tolerations: list[Mapping[str, Any]] = []
    for one in flavored:
        selector |= mapping(one.get("nodeLabels"))
        tolerations += mappings(one.get("tolerations"))
    for one in (update for update in updates if update.get("name") == name):
        selector |= mapping(one.get("nodeSelector"))
        tolerations += mappings(one.get("tolerations"))
        labels |= mapping(one.get("labels"))
        annotations |= mapping(one.get("annotations"))
    unique = [one for index, one in enumerate(tolerations) if one not in tolerations[:index]]
    return GroupAdmission(
        name=name,
        node_selector=selector,
        tolerations=tuple(dict(one) for one in unique),
        labels=labels,
        annotations=annotations,
        gated=gated,
    )


def _assignments(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(mappings(mapping(mapping(found.get("status")).get("admission")).get("podSetAssignments")))


def admit(job: Job, group: Group, template: Manifest) -> Manifest:
    """Return a group's pod template with what Kueue's admission adds to it, if the job has one."""
    granted = next((one for one in job.admission.groups if one.name == group.name), None) if job.admission else None
    if granted is None:
        return template
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    metadata["labels"] = metadata["labels"] | granted.labels
    metadata["annotations"] = metadata.get("annotations", {}) | granted.annotations
    if granted.node_selector:
        spec["nodeSelector"] = spec.get("nodeSelector", {}) | granted.node_selector
    if new := [one for one in granted.tolerations if one not in spec.get("tolerations", [])]:
        spec["tolerations"] = [*spec.get("tolerations", []), *new]
    if granted.gated:
        spec["schedulingGates"] = [{"name": f"{_KUEUE}/topology"}]
    return {"metadata": metadata, "spec": spec}
