"""One node: its own containerd and kubelet. Ending both is a real node loss."""

import json
import os
import re
import subprocess
from pathlib import Path

import yaml

from grpo_devcluster import binaries, cgroups, images, nodeconfig, packages
from grpo_devcluster.nodeconfig import NodeSpec
from grpo_devcluster.process import Daemon, kill_all
from grpo_devcluster.progress import wait_until

CNI_PLUGINS = Path("/usr/lib/cni")


class Node:
    """The programs of one node."""

    def __init__(self, spec: NodeSpec, state: Path, ca: Path, kubeconfig: Path) -> None:
        self.spec = spec
        self._state = state
        self._ca = ca
        self._kubeconfig = kubeconfig

    @property
    def containerd(self) -> Daemon:
        command = [str(binaries.binary("containerd")), "--config", str(self.spec.folder / "containerd.toml")]
        # containerd finds its shim, and the shim finds runc, by PATH.
        path = f"{binaries.bin_dir()}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return Daemon(f"containerd-{self.spec.name}", command, self._state, {"PATH": path})

    @property
    def kubelet(self) -> Daemon:
        arguments = nodeconfig.kubelet_arguments(self.spec, self.spec.folder / "kubelet.yaml", self._kubeconfig)
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return Daemon(
            f"kubelet-{self.spec.name}", [str(binaries.binary("kubelet")), *arguments], self._state, {"PATH": path}
        )

    def start(self) -> None:
        """Start the programs that do not run; return without waiting for the kubelet to be ready."""
        self._write_configuration()
        cgroups.create(self.spec.name)
        self.containerd.start()
        self._wait_for_containerd()
        self.load_own_images()
        self.kubelet.start()

    def stop(self, *, partition: bool = False) -> None:
        """End kubelet and containerd and, unless it is a partition, the pods; in a partition they go on unseen."""
        # SIGKILL, as if the power failed: a kubelet that gets SIGTERM may still report something.
        self.kubelet.stop(grace=0)
        self.containerd.stop(grace=0)
        if not partition:
            kill_all(self._shims())
            kill_all(cgroups.processes(self.spec.name))

    def running(self) -> bool:
        return self.kubelet.pid() is not None and self.containerd.pid() is not None

    def load_own_images(self) -> None:
        """Import the images that every node has."""
        for archive in (images.pause_archive(), images.workload_archive()):
            self.load(archive)

    def load(self, archive: Path) -> None:
        """Import an image archive, unless this same file was imported before."""
        stat = archive.stat()
        mark = self.spec.folder / "images" / f"{archive.name}.{stat.st_size}.{stat.st_mtime_ns}"
        if mark.exists():
            return
        self._ctr("images", "import", "--local", str(archive))
        mark.parent.mkdir(exist_ok=True)
        mark.touch()

    def _ctr(self, *args: str) -> None:
        command = [str(binaries.binary("ctr")), "--address", str(self.spec.socket), "--namespace", "k8s.io", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ctr {' '.join(args)} on {self.spec.name}: {done.stderr.strip()}")

    def _write_configuration(self) -> None:
        runc = packages.find("runc")
        if runc is None:
            raise FileNotFoundError("runc is not installed")
        folder = self.spec.folder
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        (folder / "containerd.toml").write_text(nodeconfig.toml(nodeconfig.containerd(self.spec, runc, CNI_PLUGINS)))
        (folder / "cni" / "devcluster.conflist").write_text(json.dumps(nodeconfig.cni(self.spec)))
        (folder / "kubelet.yaml").write_text(yaml.safe_dump(nodeconfig.kubelet(self.spec, self._ca)))

    def _wait_for_containerd(self) -> None:
        def answers() -> bool:
            self.containerd.require()
            try:
                self._ctr("version")
            except RuntimeError:
                return False
            return True

        wait_until(answers, f"containerd of {self.spec.name}", timeout=30)

    def _shims(self) -> list[int]:
        """Return the process ids of shims: they outlive containerd by design, and name its socket."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes().decode(errors="replace").split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if re.search(r"containerd-shim-runc-v2$", words[0]) and str(self.spec.socket) in words:
                found.append(int(file.parent.name))
        return found
