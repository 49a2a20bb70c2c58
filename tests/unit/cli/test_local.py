"""`grpo run` starts all pods on one machine: no port and no device is assigned twice."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_cli.local.processes import free_ports, local_contract
from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.topology import Job, plan_topology
from support.control_plane.jobs import spec


def test_each_pod_has_its_own_ports_and_devices() -> None:
    generation = {"topology": "Server", "server": {"groups": [{"name": "v", "replicas": 2, "gpus": 2}]}}
    groups = [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 1}]
    job = Job(
        namespace="ns",
        name="j",
        uid="u",
        generation=1,
        spec=parse_spec(spec(generation=generation, trainer={"groups": groups})),
    )
    contract = local_contract(job, plan_topology(job))
    places = [*contract.members, *contract.engines]
    assert [place.devices for place in places] == [(0, 1), (2,), (3, 4), (5, 6)]
    ports = [contract.master_port, *(m.status_port for m in contract.members), *(e.port for e in contract.engines)]
    ports += [t.port for t in contract.transfers]
    assert len(set(ports)) == len(ports)
    assert {place.host for place in (*places, *contract.transfers)} == {"127.0.0.1"}


def test_pods_use_only_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    generation = {"topology": "Server", "server": {"groups": [{"name": "v", "replicas": 1, "gpus": 1}]}}
    job = Job(
        namespace="ns",
        name="j",
        uid="u",
        generation=1,
        spec=parse_spec(spec(generation=generation, trainer={"groups": [{"name": "a", "gpus": 1}]})),
    )
    contract = local_contract(job, plan_topology(job))
    assert [place.devices for place in (*contract.members, *contract.engines)] == [(2,), (3,)]


def test_ports_are_free_and_outside_the_range_of_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < low
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not set(ports) & set(free_ports(50))
