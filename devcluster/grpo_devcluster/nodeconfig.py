"""Configuration files of one node's containerd, CNI and kubelet, made by pure functions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_devcluster import cgroups, network

PAUSE_IMAGE = "grpo.local/pause:dev"
GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class NodeSpec:
    """One node; its index decides its addresses."""

    name: str
    index: int
    gpus: int
    folder: Path

    @property
    def address(self) -> str:
        return network.node_address(self.index)

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"


def parse_nodes(text: str, folder: Path) -> list[NodeSpec]:
    """Parse `a=2,b=1` into node-a with two GPUs and node-b with one."""
    specs = []
    for index, part in enumerate(text.split(",")):
        name, _, gpus = part.partition("=")
        if not name or not gpus.isdecimal():
            raise ValueError(f"nodes: {part!r} is not NAME=GPUS, as in a=2,b=1")
        specs.append(NodeSpec(f"node-{name}", index, int(gpus), folder / f"node-{name}"))
    if len({s.name for s in specs}) < len(specs):
        raise ValueError(f"nodes: {text!r} names a node twice")
    return specs


def containerd(node: NodeSpec, runc: str, cni_plugins: Path) -> dict[str, Any]:
    """Return containerd's configuration; everything lies below the node's folder, so that two nodes share nothing."""
    runtime = {
        "runtime_type": "io.containerd.runc.v2",
        "options": {"BinaryName": runc, "Root": str(node.folder / "runc"), "SystemdCgroup": False},
    }
    return {
        "version": 3,
        "root": str(node.folder / "containerd"),
        "state": str(node.folder / "run"),
        "grpc": {"address": str(node.socket)},
        "plugins": {
            "io.containerd.cri.v1.runtime": {
                "enable_selinux": False,
                # Lowering it needs CAP_SYS_RESOURCE, which a container or a small virtual machine may not give to root.
                "restrict_oom_score_adj": True,
                "netns_mounts_under_state_dir": True,
                "containerd": {"default_runtime_name": "runc", "runtimes": {"runc": runtime}},
                "cni": {"bin_dirs": [str(cni_plugins)], "conf_dir": str(node.folder / "cni")},
            },
            "io.containerd.cri.v1.images": {"snapshotter": "overlayfs", "pinned_images": {"sandbox": PAUSE_IMAGE}},
            "io.containerd.grpc.v1.cri": {"stream_server_address": "127.0.0.1", "stream_server_port": "0"},
            # By default both use one fixed path for the whole machine.
            "io.containerd.nri.v1.nri": {"disable": True},
            "io.containerd.internal.v1.opt": {"path": str(node.folder / "opt")},
        },
    }


def cni(node: NodeSpec) -> dict[str, Any]:
    """Return the CNI configuration: one bridge for all nodes, address leases for each node."""
    first, last = network.pod_range(node.index)
    addresses = {"subnet": str(network.POD_RANGE), "rangeStart": first, "rangeEnd": last, "gateway": network.GATEWAY}
    bridge = {
        "type": "bridge",
        "bridge": network.BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(node.folder / "cni-leases"),
            "ranges": [[addresses]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {"cniVersion": "1.0.0", "name": "devcluster", "plugins": [bridge]}


def kubelet(node: NodeSpec, ca: Path) -> dict[str, Any]:
    """Return the configuration of a kubelet that shares the machine with others and with other work."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "healthzBindAddress": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.cgroup_root(node.name),
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "clusterDomain": "cluster.local",
        "clusterDNS": [network.GATEWAY],
        "resolvConf": "/dev/null",
        # Images are loaded from archives; no registry could bring back a collected one.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 16,
        # In a folder shared by two kubelets, each removes the logs of the other's pods.
        "podLogsDir": str(node.folder / "pod-logs"),
        "volumePluginDir": str(node.folder / "volume-plugins"),
    }


def kubelet_arguments(node: NodeSpec, config: Path, kubeconfig: Path) -> list[str]:
    """Return the settings that the kubelet takes only as flags."""
    return [
        f"--config={config}",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--root-dir={node.folder / 'kubelet'}",
        f"--cert-dir={node.folder / 'kubelet-pki'}",
    ]


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Write nested tables of strings, numbers, booleans and lists of strings; containerd's file needs no more."""
    lines, tables = [], []
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{json.dumps(key)}"
            tables.append(f"\n[{name}]\n{toml(value, name + '.')}")
        else:
            lines.append(f"{key} = {json.dumps(value)}\n")
    return "".join(lines + tables)
