"""`grpo run` starts all pods on one machine: no port and no device is assigned twice, and each has its variables."""

import os
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_cli.errors import CliError
from grpo_cli.local.environment_pods import EnvironmentPods
from grpo_cli.local.processes import free_ports, local_contract
from grpo_cli.local.variables import variables
from grpo_devcluster.progress import wait_until
from grpo_operator.api import names
from support.control_plane.jobs import spec, world


def test_each_pod_has_its_own_ports_and_devices() -> None:
    generation = {"topology": "Server", "server": {"groups": [{"name": "v", "replicas": 2, "gpus": 2}]}}
    groups = [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 1}]
    contract = local_contract(*world(generation=generation, trainer={"groups": groups}))
    places = [*contract.members, *contract.engines]
    assert [place.devices for place in places] == [(0, 1), (2,), (3, 4), (5, 6)]
    ports = [contract.master_port, *(m.status_port for m in contract.members), *(e.port for e in contract.engines)]
    ports += [t.port for t in contract.transfers]
    assert len(set(ports)) == len(ports)
    assert {place.host for place in (*places, *contract.transfers)} == {"127.0.0.1"}


def test_an_engine_over_pods_is_refused_on_one_machine() -> None:
    group = {"name": "v", "replicas": 2, "gpus": 1, "podsPerEngine": 2}
    made, topology = world(generation={"topology": "Server", "server": {"groups": [group]}})
    with pytest.raises(CliError, match="podsPerEngine of group v needs a cluster"):
        local_contract(made, topology)


def test_pods_use_only_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    generation = {"topology": "Server", "server": {"groups": [{"name": "v", "replicas": 1, "gpus": 1}]}}
    contract = local_contract(*world(generation=generation, trainer={"groups": [{"name": "a", "gpus": 1}]}))
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


def test_processes_get_the_variables_whose_values_the_manifest_has(tmp_path: Path) -> None:
    """As each pod's own code is found, with its PYTHONPATH: here one that notes its variables in place of training."""
    code = tmp_path / "code"
    code.mkdir()
    note = f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, os.environ['POD_NAME']).write_text(os.environ['MINE'])"
    (code / "sitecustomize.py").write_text(f"{note}\nos._exit(3)\n")
    env: list[dict[str, Any]] = [{"name": "PYTHONPATH", "value": str(code)}, {"name": "MINE", "value": "job"}]
    env.append({"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})
    own = {"podTemplate": {"env": [{"name": "MINE", "value": "group"}]}}
    groups = [{"name": "a", "gpus": 1}, {"name": "b", "gpus": 1} | own]
    job = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "j"}}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job | {"spec": spec(podTemplate={"env": env}, trainer={"groups": groups})}))
    command = [sys.executable, "-m", "grpo_cli", "run", str(manifest), "--output", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "of podTemplate, not set here: TOKEN: only a cluster has their values" in ended.stdout, ended.stderr
    assert ended.stdout.count("ended with 3 and no result") == 2
    assert {name: (tmp_path / name).read_text() for name in ("j-a-0", "j-b-0")} == {"j-a-0": "job", "j-b-0": "group"}


def test_environment_pods_have_addresses_and_variables_of_their_own() -> None:
    env = [{"name": "KEY", "value": "k"}, {"name": "MINE", "value": "pod's"}]
    server = {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}]}}
    made, topology = world(
        tools=[{"function": "m:f"}],
        environmentPods={"groups": [{"name": "boxes", "replicas": 2, "podTemplate": {"env": env}}]},
        podTemplate={"env": [{"name": "MINE", "value": "job's"}]},
        generation=server,
    )
    contract = local_contract(made, topology)
    (group,) = contract.environment_pods
    ports = [int(address.removeprefix("127.0.0.1:")) for address in group.addresses]
    ports += [contract.master_port, *(member.status_port for member in contract.members)]
    assert len({*ports}) == len(ports) == 5
    boxes = {f"job-boxes-{pod}": {"KEY": "k", "MINE": "pod's"} for pod in range(2)}
    others = {f"job-{group}-0": {"MINE": "job's"} for group in ("a", "b", "gen")}
    assert variables(made, topology).by_pod == others | boxes


def test_an_environment_pod_that_ends_begins_again(tmp_path: Path) -> None:
    env = [{"name": "PYTHONPATH", "value": os.pathsep.join(sys.path)}]
    made, topology = world(
        tools=[{"function": "support.trainer.user_tools:add"}],
        environmentPods={"groups": [{"name": "boxes", "podTemplate": {"env": env}}]},
        generation={"engine": "vLLM"},
    )
    contract = local_contract(made, topology)
    address = contract.environment_pods[0].addresses[0]

    def is_ready() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/ready", timeout=10) as response:
            return response.status == 200
        return False

    pods = EnvironmentPods(made, topology, contract, tmp_path, variables(made, topology).by_pod)
    try:
        wait_until(is_ready, "the pod is ready", 120)
        first = pods.processes["job-boxes-0"]
        pods.restart()
        assert pods.processes["job-boxes-0"] is first
        first.kill()
        first.wait()
        assert not is_ready()
        pods.restart()
        wait_until(is_ready, "the pod is ready again", 120)
    finally:
        for process in pods.processes.values():
            process.kill()
            process.wait()
