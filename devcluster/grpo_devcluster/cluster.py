"""The whole cluster: control plane, network, nodes, services, storage. One per machine."""

import datetime
import shutil
import subprocess
from pathlib import Path

from grpo_devcluster import binaries, cgroups, kube, network, nodeconfig, packages, paths, policies, services, storage
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.locks import locked
from grpo_devcluster.node import Node
from grpo_devcluster.nodeconfig import GPU, NodeSpec
from grpo_devcluster.process import Daemon
from grpo_devcluster.progress import say, step, wait_until

DEFAULT_NODES = "a=2,b=1"
_PORT = 6443
# `down` keeps these: logs explain what went wrong, volumes hold what was trained.
_KEPT = {"logs", "storage", "lock"}


class Cluster:
    """The cluster below `state`; every call finds the programs that an earlier one started."""

    def __init__(self, state: Path | None = None) -> None:
        self.state = state or paths.default_state()

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    def up(self, nodes: str | None = None) -> None:
        """Start the programs that do not run, and return when every node accepts pods."""
        with locked(self.state):
            wanted = self._settle_nodes(nodes)
            binaries.build("cluster")
            packages.ensure(packages.NODE)
            fresh = not (self.state / "etcd").exists()
            if self.running():
                say("is up already")
                # The images may have changed with this checkout since the cluster was started.
                for node in self.nodes():
                    node.load_own_images()
            else:
                with step("start"):
                    self._start(fresh=fresh)
            storage.recycle(self.kubeconfig)
            policies.create(self.kubeconfig)
            say(f"{len(wanted)} nodes ready; export KUBECONFIG={self.kubeconfig}")

    def down(self) -> None:
        """End everything and remove every trace except logs and volumes."""
        with locked(self.state):
            for node in self.nodes():
                node.stop()
            for daemon in self._services():
                daemon.stop(grace=0)
            self.control_plane().stop()
            _unmount_below(self.state)
            _drop_log_links(self.state)
            cgroups.remove()
            if not packages.missing(packages.NODE):
                network.down(self.state / "sysctls.json")
            for path in self.state.iterdir():
                if path.name not in _KEPT:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            say("is down")

    def running(self) -> bool:
        """Return whether every program of the cluster runs."""
        return self.exists() and all(daemon.pid() for daemon in self.daemons())

    def exists(self) -> bool:
        return (self.state / "endpoints.json").exists()

    def daemons(self) -> list[Daemon]:
        """Return every program of the cluster in the order of their start."""
        nodes = [d for node in self.nodes() for d in (node.containerd, node.kubelet)]
        return [*self.control_plane().daemons(), *self._services(), *nodes] if self.exists() else []

    def nodes(self) -> list[Node]:
        ca = self.control_plane().pki.ca
        return [Node(s, self.state, ca, self.state / "config" / f"kubelet-{s.name}.kubeconfig") for s in self._specs()]

    def node(self, name: str) -> Node:
        """Return a node by its name, with or without the prefix `node-`."""
        for node in self.nodes():
            if node.spec.name in {name, f"node-{name}"}:
                return node
        raise LookupError(f"no node {name}; there are {', '.join(n.spec.name for n in self.nodes()) or 'none'}")

    def start_node(self, name: str) -> None:
        """Start one node, and wait until it is ready with its GPUs."""
        since = _now()
        node = self.node(name)
        node.start()
        self._wait_ready(node, since)

    def load(self, archive: Path) -> None:
        """Import an image into every node."""
        for node in self.nodes():
            node.load(archive)

    def control_plane(self) -> ControlPlane:
        names = [s.name for s in self._specs()]
        return ControlPlane(self.state, address=network.GATEWAY, port=_PORT, nodes=names, detached=True)

    def _start(self, *, fresh: bool) -> None:
        since = _now()
        network.up(len(self._specs()), self.state / "sysctls.json")
        # Before etcd has its folder, which marks a cluster that is not fresh: a start that failed half-way continues.
        storage.prepare(self.state / "storage", fresh=fresh)
        plane = self.control_plane()
        plane.start()
        kube.apply(self.kubeconfig, [*services.coredns_rights(), *storage.manifests(self.state / "storage")])
        programs = self._services()
        for daemon in programs:
            daemon.start()
        for node in self.nodes():
            node.start()
        for node in self.nodes():
            self._wait_ready(node, since)
        services.wait_ready(programs)

    def _wait_ready(self, node: Node, since: datetime.datetime) -> None:
        spec = node.spec
        api = kube.core(self.kubeconfig)

        def ready() -> bool:
            node.kubelet.require()
            node.containerd.require()
            found = api.list_node(field_selector=f"metadata.name={spec.name}").items
            if not found or not kube.is_ready(found[0], since):
                return False
            # A kubelet that registers sets the capacity of devices without a plugin to zero.
            if str(spec.gpus) == found[0].status.allocatable.get(GPU):
                return True
            if spec.gpus:
                count = {GPU: str(spec.gpus)}
                api.patch_node_status(spec.name, {"status": {"capacity": count, "allocatable": count}})
            return spec.gpus == 0

        wait_until(ready, f"{spec.name} ready", timeout=120)

    def _services(self) -> list[Daemon]:
        config = self.state / "config"
        specs = self._specs()
        return services.daemons(self.state, config, specs[0].name) if specs and config.exists() else []

    def _specs(self) -> list[NodeSpec]:
        file = self.state / "nodes"
        return nodeconfig.parse_nodes(file.read_text(), self.state / "nodes.d") if file.exists() else []

    def _settle_nodes(self, nodes: str | None) -> list[NodeSpec]:
        file = self.state / "nodes"
        if not file.exists():
            nodeconfig.parse_nodes(nodes or DEFAULT_NODES, self.state)
            file.write_text(nodes or DEFAULT_NODES)
        elif nodes is not None and nodes != file.read_text():
            raise ValueError(f"the cluster has the nodes {file.read_text()}, not {nodes}: run `down` first")
        return self._specs()


def _now() -> datetime.datetime:
    # The API's times are in whole seconds.
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _drop_log_links(folder: Path) -> None:
    """Remove the links that kubelets create in a folder of the machine that cannot be configured."""
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(folder):
            link.unlink()


def _unmount_below(folder: Path) -> None:
    """Unmount file systems that containers left, innermost first."""
    for point in reversed(_mounts_below(folder)):
        subprocess.run(["umount", "--lazy", point], check=True)
    # The caller removes the folder, which would empty what is still mounted there, for example a volume.
    if left := _mounts_below(folder):
        raise RuntimeError(f"still mounted: {', '.join(left)}")


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    return [p for p in points if Path(p).is_relative_to(folder) and p != str(folder)]
