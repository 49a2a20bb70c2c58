"""Connections that the pods of a job accept: its NetworkPolicies. Pure.

vLLM's routes for weight updates have no authentication: what may connect to an engine's port may change the policy.
NCCL and gloo connect pods on ports that they choose, so between roles that share a process group a single port is left
out of all others.
"""

from __future__ import annotations

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest, metadata
from grpo_spec.contract import ENVIRONMENT_PORT

_LAST_PORT = 65535


def network_policies(job: Job) -> list[Manifest]:
    """Return the policy of trainer pods (and the pod that downloads), and those of engine and environment pods.

    The launchers' status port is read-only, and open to all. A pod always reaches itself. Environment pods, which run
    what the model asks for, are in no list of those that are let in.
    """
    server, node_local = job.spec.generation.server, job.spec.generation.node_local
    trainers, engines = _pods(job, Role.TRAINER), _pods(job, Role.GENERATION)
    own = {"from": [trainers]}
    if node_local is not None:  # ranks use the engines of their own pod alone
        last = node_local.port + node_local.engines_per_node - 1
        own = {"from": [trainers], "ports": _all_but(node_local.port, last)}
    ingress = [own, {"ports": [{"port": job.spec.rendezvous.status_port, "protocol": "TCP"}]}]
    if server is not None:  # engines receive weights in a process group of theirs and rank 0
        ingress.insert(1, {"from": [engines], "ports": _all_but(job.spec.rendezvous.port)})
    others = [Role.GENERATION.value, *([Role.ENVIRONMENT.value] if job.spec.environment_pods else [])]
    elsewhere = {"key": names.LABEL_ROLE, "operator": "NotIn", "values": others}
    selector = {"matchLabels": {names.LABEL_JOB_UID: job.uid}, "matchExpressions": [elsewhere]}
    policies = [_policy(job, names.policy_name(job.name), selector, ingress)]
    if server is not None:
        ingress = [{"from": [trainers]}, {"from": [engines], "ports": _all_but(server.port)}]
        policies.append(_policy(job, names.engine_policy_name(job.name), engines["podSelector"], ingress))
    if job.spec.environment_pods is not None:
        environments = _pods(job, Role.ENVIRONMENT)["podSelector"]
        # Most network plugins do not see pods with the node's network as pods.
        is_hosts = any(group.pod_template.host_network for group in job.spec.trainer.groups)
        peers: Manifest = {} if is_hosts or job.spec.pod_template.host_network else {"from": [trainers]}
        ingress = [peers | {"ports": [{"port": ENVIRONMENT_PORT, "protocol": "TCP"}]}]
        policies.append(_policy(job, names.environment_policy_name(job.name), environments, ingress))
    return policies


def _pods(job: Job, role: Role) -> Manifest:
    return {"podSelector": {"matchLabels": {names.LABEL_JOB_UID: job.uid, names.LABEL_ROLE: role.value}}}


def _all_but(first: int, last: int | None = None) -> list[Manifest]:
    """Return all TCP ports but these; the fields of the spec allow none at either end."""
    ranges = ((1, first - 1), ((last or first) + 1, _LAST_PORT))
    return [{"port": begin, "endPort": end, "protocol": "TCP"} for begin, end in ranges if begin <= end]


def _policy(job: Job, name: str, selector: Manifest, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, name),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress},
    }
