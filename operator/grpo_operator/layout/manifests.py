"""Build a job's children (Service, NetworkPolicy, ConfigMap, StatefulSets) as plain dicts, equal for equal input.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.layout.affinity import topology_key
from grpo_operator.layout.contracts import make_contract, make_environment_contract
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest, metadata
from grpo_operator.layout.pods import (
    APP_PROTOCOLS,
    environment_ports,
    pod_settings,
    pod_template,
    port_numbers,
)
from grpo_operator.layout.policies import network_policies
from grpo_operator.layout.queueing import admit
from grpo_operator.layout.topology import Topology


def manifests(
    job: Job,
    topology: Topology,
    attempt: int,
    avoid: Sequence[str] = (),
    *,
    created_for: int | None = None,
    policies: bool = True,
) -> list[Manifest]:
    """Return every child of an attempt, in the order in which they are applied.

    Pods avoid the nodes `avoid` if possible. `created_for`: the attempt that the pods were created for, if that is an
    earlier one.
    """
    first = attempt if created_for is None else created_for
    guard = network_policies(job) if policies else []
    gang = [pod_group(job, topology, first)] if topology.gang_pods else []
    maps = [environment_map(job, group) for group in topology.environment_groups]
    shared = [service(job), *guard, contract_map(job, topology, attempt, first), *maps, *gang]
    environments = [statefulset(job, group, first) for group in topology.environment_groups]
    return [*shared, *environments, *(statefulset(job, group, first, avoid) for group in topology.groups)]


def service(job: Job) -> Manifest:
    """Return the headless Service of all pods.

    It publishes addresses of pods that are not ready: the rendezvous needs them.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: job.uid},
            "ports": [
                {
                    "name": name,
                    "port": port,
                    "protocol": "TCP",
                    "appProtocol": APP_PROTOCOLS.get(name, "tcp"),
                    "targetPort": port,
                }
                for name, port in (port_numbers(job) | environment_ports(job)).items()
            ],
        },
    }


def contract_map(job: Job, topology: Topology, attempt: int, created_for: int) -> Manifest:
    """Return the ConfigMap with an attempt's contract, for pods that were created for this attempt or an earlier one.

    It is immutable, unless a later attempt may begin in the same pods: all pods read the same, however late they start.
    """
    stays = job.spec.failure_policy.restart_strategy == "Recreate"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.contract_name(job.name, created_for), attempt=attempt),
        **({"immutable": True} if stays else {}),
        "data": {
            "contract.json": make_contract(job, topology, attempt).model_dump_json(
                by_alias=True, exclude_none=True, indent=1
            )
        },
    }


def environment_map(job: Job, group: Group) -> Manifest:
    """Return the ConfigMap that the pods of an environment group read. It outlives attempts."""
    contract = make_environment_contract(job, group)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.environment_map_name(job.name, group.name), group=group),
        "data": {"contract.json": contract.model_dump_json(by_alias=True, exclude_none=True, indent=1)},
    }


def pod_group(job: Job, topology: Topology, attempt: int) -> Manifest:
    """Return the PodGroup that gives all pods of an attempt nodes at once, or none.

    Other fields than the policy need feature gates of their own. An API server drops fields whose gate is off.
    """
    priority = pod_settings(job, topology.groups[0]).priority_class_name
    key = topology_key(job) if job.spec.scheduling.topology_policy == "Required" else None
    return {
        "apiVersion": names.api_version(names.GANG_KIND),
        "kind": names.GANG_KIND,
        "metadata": metadata(job, names.pod_group_name(job.name, attempt), attempt=attempt),
        "spec": {
            "schedulingPolicy": {"gang": {"minCount": len(topology.gang_pods)}},
            "disruptionMode": {"all": {}},  # an attempt that loses one pod ends
            **({"priorityClassName": priority} if priority else {}),
            **({"schedulingConstraints": {"topology": [{"key": key}]}} if key else {}),
        },
    }


def statefulset(job: Job, group: Group, attempt: int, avoid: Sequence[str] = ()) -> Manifest:
    """Return a group's StatefulSet.

    podManagementPolicy is Parallel: OrderedReady would wait for ordinal 0 to be ready, which waits for all other pods
    (kubernetes#67250).
    """
    selector = {names.LABEL_JOB_UID: job.uid, names.LABEL_GROUP: group.name}
    of_attempt = None if group.role is Role.ENVIRONMENT else attempt
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(job, group.statefulset, attempt=of_attempt, group=group),
        "spec": {
            "replicas": group.spec.replicas,
            "serviceName": job.name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector},
            "template": admit(job, group, pod_template(job, group, attempt, avoid)),
        },
    }
