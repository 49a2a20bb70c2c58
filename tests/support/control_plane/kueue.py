"""Kueue: its CRDs, and its controller with its webhooks, built from its Go module and run as a process."""

import base64
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from benchmarks.control_plane.peers import Peer, build

from grpo_cli.local.processes import free_ports
from grpo_devcluster import binaries
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.process import Daemon
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import wait_for_crd

KUEUE = Peer("kueue", "sigs.k8s.io/kueue", "v0.19.2", "./cmd/kueue", "config/components/crd/bases", "")
WEBHOOKS = ("clusterqueues", "resourceflavors", "workloads", "pods", "statefulsets", "jobs")


def source() -> Any:
    """Return the folder of its source."""
    return binaries.module(f"{KUEUE.module}@{KUEUE.version}")


def install_crds(kubectl: Any) -> None:
    """Apply its CRDs."""
    files = sorted((source() / KUEUE.crds).glob("*.yaml"))
    crds = [crd for file in files for crd in yaml.safe_load_all(file.read_text())]
    for crd in crds:
        crd["spec"].pop("conversion", None)  # its webhook is for objects of older versions
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(crds))
    for crd in crds:
        wait_for_crd(kubectl, crd["metadata"]["name"])


@contextmanager
def running(plane: ControlPlane, kubectl: Any, **more: Any) -> Iterator[Daemon]:
    """Run its controller. `more`: its configuration beyond that."""
    webhook, probe = free_ports(2)
    folder = plane.state / "kueue" / "kueue" / "metrics" / "certs"
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in zip(("tls.crt", "tls.key"), plane.pki.certificate("apiserver"), strict=True):
        (folder / name).write_bytes(file.read_bytes())
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(folder)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{probe}"},
        "integrations": {
            "frameworks": ["batch/job", "pod", "statefulset"],
            "externalFrameworks": ["GRPOJob.v1alpha1.training.grpo.dev"],
        },
        **more,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    kubectl("create", "namespace", "kueue-system")
    program = [str(build(KUEUE)), f"--config={folder / 'config.yaml'}", "--feature-gates=VisibilityOnDemand=false"]
    # Certificates of its own are read from /etc/kueue/metrics/certs, which no option changes.
    etc = 'mount -t overlay kueue -o lowerdir="$0":/etc /etc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", etc, str(plane.state / "kueue"), *program]
    daemon = Daemon("kueue", command, plane.state, {"KUBECONFIG": str(plane.kubeconfig)}, detached=False)
    daemon.start()
    hooks = _webhooks(plane, webhook)
    try:
        wait_until(lambda: _is_ready(probe), "Kueue is ready", 60, interval=0.2)
        kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(hooks))
        yield daemon
    finally:
        kubectl("delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all(hooks))
        daemon.stop()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _webhooks(plane: ControlPlane, port: int) -> list[dict[str, Any]]:
    """Return its webhooks for what these tests have, with the address of this machine."""
    text = (source() / "config/components/webhook/manifests.yaml").read_text()
    found = list(yaml.safe_load_all(text))
    authority = base64.b64encode(plane.pki.ca.read_bytes()).decode()
    for one in found:
        one["metadata"]["name"] = f"kueue-{one['metadata']['name']}"
        one["webhooks"] = [hook for hook in one["webhooks"] if {*WEBHOOKS} & {*hook["rules"][0]["resources"]}]
        for hook in one["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
    return found
