"""The rendered NetworkPolicies allow the right traffic, for every pair of pods of two jobs and every port.

The test evaluates the policies itself: nothing on a test machine enforces them.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.manifests import Manifest, manifests
from grpo_operator.layout.topology import Job, plan_topology
from support.control_plane.jobs import spec

SERVER = {"topology": "Server", "server": {"groups": [{"name": "g", "replicas": 2, "gpus": 2}]}}
NODE_LOCAL = {"topology": "NodeLocal", "nodeLocal": {"gpusPerNode": 1}}
STATUS = 29501
PORTS = {"rendezvous": 29500, "status": STATUS, "engine": 8000, "transfer": 29600, "anything": 12345}


@dataclass(frozen=True)
class Pod:
    """The facts about a pod that policies use."""

    namespace: str
    name: str
    labels: tuple[tuple[str, str], ...]


def _job(name: str, namespace: str, generation: dict[str, Any]) -> tuple[list[Pod], list[Manifest]]:
    groups = [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 3}]
    made = Job(
        namespace=namespace,
        name=name,
        uid=f"uid-of-{namespace}-{name}",
        generation=1,
        spec=parse_spec(spec(generation=generation, trainer={"groups": groups})),
    )
    children = manifests(made, plan_topology(made), 0)
    pods = [
        Pod(
            namespace,
            f"{child['metadata']['name']}-{ordinal}",
            tuple(child["spec"]["template"]["metadata"]["labels"].items()),
        )
        for child in children
        if child["kind"] == "StatefulSet"
        for ordinal in range(child["spec"]["replicas"])
    ]
    return pods, [child for child in children if child["kind"] == "NetworkPolicy"]


def _selects(selector: dict[str, Any], pod: Pod) -> bool:
    return selector.get("matchLabels", {}).items() <= dict(pod.labels).items()


def _allowed(policies: list[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Evaluate policies as networking/v1 does.

    Policies that select a pod add up; a peer without namespaceSelector is in the policy's namespace.
    """
    selecting = [
        p
        for p in policies
        if p["metadata"]["namespace"] == target.namespace and _selects(p["spec"]["podSelector"], target)
    ]
    if not selecting:
        return True
    for policy in selecting:
        for rule in policy["spec"]["ingress"]:
            peers = rule.get("from")
            known = peers is None or any(
                source.namespace == target.namespace and _selects(p["podSelector"], source) for p in peers
            )
            ports = rule.get("ports")
            if known and (ports is None or any(p["port"] == port for p in ports)):
                return True
    return False


@pytest.mark.parametrize("generation", [SERVER, NODE_LOCAL, {}], ids=["Server", "NodeLocal", "Colocate"])
@pytest.mark.parametrize("other", [("two", "ns"), ("one", "elsewhere")], ids=["same-namespace", "same-name"])
def test_only_a_jobs_own_pods_reach_its_ports_except_the_status_port(
    generation: dict[str, Any], other: tuple[str, str]
) -> None:
    mine, my_policies = _job("one", "ns", generation)
    theirs, their_policies = _job(*other, generation)
    stranger = Pod("ns", "stranger", (("app", "web"),))
    policies = my_policies + their_policies
    for source, target, port in product([*mine, *theirs, stranger], [*mine, *theirs], PORTS.values()):
        same_job = (source in mine and target in mine) or (source in theirs and target in theirs)
        assert _allowed(policies, source, target, port) == (same_job or port == STATUS), (
            source.name,
            target.name,
            port,
        )
