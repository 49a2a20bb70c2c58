"""The rendered NetworkPolicies allow the right traffic, for every pair of pods of two jobs and ports around each limit.

The test evaluates the policies itself: nothing on a test machine enforces them.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from grpo_operator.api import names
from grpo_operator.layout.downloads import download_job
from grpo_operator.layout.manifests import Manifest, manifests
from grpo_operator.layout.policies import network_policies
from grpo_operator.layout.topology import plan_topology
from support.control_plane.jobs import job

SERVER = {"topology": "Server", "server": {"groups": [{"name": "g", "replicas": 2, "gpus": 2}]}}
NODE_LOCAL = {"topology": "NodeLocal", "nodeLocal": {"gpusPerNode": 2, "enginesPerNode": 2}}
STATUS, RENDEZVOUS, ENGINE, ENVIRONMENT = 29501, 29500, 8000, 29502
PORTS = (1, RENDEZVOUS - 1, RENDEZVOUS, STATUS, ENVIRONMENT, ENGINE - 1, ENGINE, ENGINE + 1, 29600, 12345, 65535)


ENVIRONMENTS = {"tools": [{"function": "m:f"}], "environmentPods": {"groups": [{"name": "e", "replicas": 2}]}}


@dataclass(frozen=True)
class Pod:
    """The facts about a pod that policies use."""

    namespace: str
    name: str
    labels: tuple[tuple[str, str], ...]


def _job(name: str, namespace: str, generation: dict[str, Any]) -> tuple[list[Pod], list[Manifest]]:
    groups = [{"name": "a", "gpus": 3}, {"name": "b", "gpus": 4}]
    made = job(generation=generation, trainer={"groups": groups}, **ENVIRONMENTS)
    made = replace(made, namespace=namespace, name=name, uid=f"uid-of-{namespace}-{name}")
    topology = plan_topology(made)
    children = manifests(made, topology, 0)
    download = tuple(download_job(made, topology)["spec"]["template"]["metadata"]["labels"].items())
    pods = [Pod(namespace, f"{name}-download-x", download)]
    for one in (child for child in children if child["kind"] == "StatefulSet"):
        labels = tuple(one["spec"]["template"]["metadata"]["labels"].items())
        pods += [Pod(namespace, f"{one['metadata']['name']}-{n}", labels) for n in range(one["spec"]["replicas"])]
    return pods, [child for child in children if child["kind"] == "NetworkPolicy"]


def _role(pod: Pod) -> str:
    return dict(pod.labels).get(names.LABEL_ROLE, "")


def _selects(selector: dict[str, Any], pod: Pod) -> bool:
    labels = dict(pod.labels)
    assert all(one["operator"] == "NotIn" for one in selector.get("matchExpressions", ()))
    excluded = any(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))
    return selector.get("matchLabels", {}).items() <= labels.items() and not excluded


def _covers(ports: list[dict[str, Any]] | None, port: int) -> bool:
    return ports is None or any(one["port"] <= port <= one.get("endPort", one["port"]) for one in ports)


def _allowed(policies: list[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Evaluate policies as networking/v1 does.

    Policies that select a pod add up; a peer without namespaceSelector is in the policy's namespace. A pod
    reaches itself.
    """
    here = [p["spec"] for p in policies if p["metadata"]["namespace"] == target.namespace]
    selecting = [spec for spec in here if _selects(spec["podSelector"], target)]
    if not selecting or source == target:
        return True
    for rule in (rule for policy in selecting for rule in policy["ingress"]):
        peers = rule.get("from")
        known = peers is None or any(
            source.namespace == target.namespace and _selects(p["podSelector"], source) for p in peers
        )
        if known and _covers(rule.get("ports"), port):
            return True
    return False


CLOSED = {
    ("trainer", "trainer"): {"NodeLocal": (ENGINE, ENGINE + 1)},
    ("trainer", "generation"): {},
    ("generation", "trainer"): {"Server": (RENDEZVOUS,)},
    ("generation", "generation"): {"Server": (ENGINE,)},
    ("trainer", "download"): {"NodeLocal": (ENGINE, ENGINE + 1)},
    ("generation", "download"): {"Server": (RENDEZVOUS,)},
    ("trainer", "environment"): dict.fromkeys(
        ("Server", "NodeLocal", "Colocate"), tuple(port for port in PORTS if port != ENVIRONMENT)
    ),
}
"""Ports that a role does not reach on another of the same job, by topology. What is not listed reaches no port."""


@pytest.mark.parametrize("topology", ["Server", "NodeLocal", "Colocate"])
@pytest.mark.parametrize("other", [("two", "ns"), ("one", "elsewhere")], ids=["same-namespace", "same-name"])
def test_a_role_reaches_the_ports_of_its_jobs_other_roles_that_it_needs_and_everybody_the_status_port(
    topology: str, other: tuple[str, str]
) -> None:
    generation = {"Server": SERVER, "NodeLocal": NODE_LOCAL, "Colocate": {}}[topology]
    mine, my_policies = _job("one", "ns", generation)
    theirs, their_policies = _job(*other, generation)
    stranger = Pod("ns", "stranger", (("app", "web"),))
    policies = my_policies + their_policies
    for source, target, port in product([*mine, *theirs, stranger], [*mine, *theirs], PORTS):
        same_job = (source in mine and target in mine) or (source in theirs and target in theirs)
        closed = CLOSED.get((_role(source), _role(target)), {}).get(topology, ()) if same_job else PORTS
        if (_role(source), _role(target)) not in CLOSED:
            closed = PORTS
        opened = port == STATUS and _role(target) not in ("generation", "environment")
        wanted = source == target or opened or port not in closed
        assert _allowed(policies, source, target, port) == wanted, (source.name, target.name, port)


def test_the_fields_of_the_spec_leave_no_port_out_at_either_end() -> None:
    server = {"groups": [{"name": "g", "gpus": 1}], "port": 65535}
    _, policies = _job("one", "ns", {"topology": "Server", "server": server})
    (_, engines, _) = policies
    assert engines["spec"]["ingress"][1]["ports"] == [{"port": 1, "endPort": 65534, "protocol": "TCP"}]


def test_trainer_pods_with_the_nodes_network_reach_environment_pods() -> None:
    """Most network plugins take them for no pods, so that a list of pods would shut them out."""
    *_, environments = network_policies(job(podTemplate={"hostNetwork": True}, **ENVIRONMENTS))
    assert environments["spec"]["ingress"] == [{"ports": [{"port": ENVIRONMENT, "protocol": "TCP"}]}]
