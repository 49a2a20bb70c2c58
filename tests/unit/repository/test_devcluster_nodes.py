"""Configuration of the devcluster's nodes: names and addresses, separate folders, DNS, and the clean-up of iptables."""

import ipaddress
import json
import tomllib
from pathlib import Path

import pytest

from grpo_devcluster import network, nodeconfig, services

FOLDER = Path("/state/nodes.d")


def test_nodes_are_read_from_one_argument() -> None:
    first, second = nodeconfig.parse_nodes("a=2,b=1", FOLDER)
    assert (first.name, first.gpus, second.name, second.gpus) == ("node-a", 2, "node-b", 1)
    assert first.address != second.address


@pytest.mark.parametrize("text", ["", "a", "a=", "=2", "a=x", "a=1,", "a=-1"])
def test_nodes_that_cannot_be_read_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=GPUS"):
        nodeconfig.parse_nodes(text, FOLDER)


def test_a_node_cannot_be_named_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        nodeconfig.parse_nodes("a=1,a=2", FOLDER)


def test_pod_ranges_lie_on_the_bridge_and_do_not_overlap() -> None:
    ends = [ipaddress.ip_address(a) for i in range(5) for a in network.pod_range(i)]
    assert ends == sorted(ends)
    assert all(end in network.POD_RANGE for end in ends)
    assert not {network.node_address(i) for i in range(5)} & {str(e) for e in ends}


def test_two_nodes_share_no_path() -> None:
    first, second = nodeconfig.parse_nodes("a=2,b=1", FOLDER)
    for configure in (
        lambda n: nodeconfig.containerd(n, "/usr/sbin/runc", Path("/cni")),
        lambda n: nodeconfig.kubelet(n, Path("/ca")),
    ):
        assert "node-b" not in json.dumps(configure(first))
        assert "node-a" not in json.dumps(configure(second))


def test_toml_is_read_back_as_it_was_written() -> None:
    (node,) = nodeconfig.parse_nodes("a=2", FOLDER)
    table = nodeconfig.containerd(node, "/usr/sbin/runc", Path("/cni"))
    assert tomllib.loads(nodeconfig.toml(table)) == table


def test_names_outside_the_cluster_do_not_exist() -> None:
    text = services.corefile(Path("/config"))
    assert "NXDOMAIN" in text
    assert "forward" not in text
    assert text.count("{") == text.count("}")


def test_kubernetes_rules_are_dropped_and_others_kept() -> None:
    ours = (
        ":KUBE-SERVICES - [0:0]\n-A PREROUTING -m comment --comment x -j KUBE-SERVICES\n"
        "-A KUBE-SERVICES -d 10.96.0.1/32 -j DNAT\n"
    )
    others = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -i eth0 -j ACCEPT\nCOMMIT\n"
    assert network.without_kubernetes(others + ours) == others
