"""The controllers of JobSet and LeaderWorkerSet: built from their Go modules into the cache, run as processes.

Each runs with the defaults of its release but for what its configuration below says: a rate of requests that holds
nobody back, a log without debug lines, and no election of a leader. Neither has an option for the number of workers;
both have one for each kind.
"""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from grpo_cli.local.processes import free_ports
from grpo_devcluster import binaries, kube, paths
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.locks import locked
from grpo_devcluster.process import Daemon
from grpo_devcluster.progress import step
from support.control_plane.operators import kubeconfig_of, wait_for_crd

NAMESPACE = "peers"


@dataclass(frozen=True)
class Peer:
    """A controller of others, by its Go module."""

    name: str
    module: str
    version: str
    package: str
    crds: str
    group: str  # API group of its configuration

    @property
    def user(self) -> str:
        """Its name in the audit log."""
        return f"system:serviceaccount:{NAMESPACE}:{self.name}"


JOBSET = Peer("jobset", "sigs.k8s.io/jobset", "v0.12.0", ".", "config/components/crd/bases", "config.jobset.x-k8s.io")
LWS = Peer("lws", "sigs.k8s.io/lws", "v0.9.0", "./cmd", "config/crd/bases", "config.lws.x-k8s.io")


def build(peer: Peer) -> Path:
    """Return the program, built with the versions of its own go.mod unless it is in the cache."""
    folder = paths.cache_dir() / "peers"
    program = folder / f"{peer.name}-{peer.version}"
    with locked(folder):
        if not program.exists():
            made = program.with_suffix(".unfinished")
            source = binaries.module(f"{peer.module}@{peer.version}")
            command = binaries.go("build", "-C", str(source), "-ldflags=-s -w", "-o", str(made), peer.package)
            with step(f"build {peer.module} {peer.version}"):
                subprocess.run(command, env=binaries.environment(), check=True)
            made.rename(program)
    return program


def install(plane: ControlPlane, peer: Peer) -> Daemon:
    """Apply a peer's CRDs and rights; return its controller, which is not started."""
    source = binaries.module(f"{peer.module}@{peer.version}")
    crds = [crd for file in sorted((source / peer.crds).glob("*.yaml")) for crd in yaml.safe_load_all(file.read_text())]
    kube.apply(plane.kubeconfig, [*crds, *_account(peer)])

    def kubectl(*args: str) -> str:
        return kube.kubectl(plane.kubeconfig, *args)

    for crd in crds:
        wait_for_crd(kubectl, crd["metadata"]["name"])
    webhook, probe = free_ports(2)
    if peer is LWS:
        kube.apply(plane.kubeconfig, [_pod_labels(plane, webhook)])
    config = plane.state / f"{peer.name}.yaml"
    config.write_text(yaml.safe_dump(_configuration(peer, _certificates(plane), webhook, probe)))
    command = [str(build(peer)), f"--config={config}", "--zap-log-level=info"]
    environment = {"KUBECONFIG": str(kubeconfig_of(plane, kubectl, NAMESPACE, peer.name))}
    return Daemon(peer.name, command, plane.state, environment, detached=False)


def _account(peer: Peer) -> Iterator[dict[str, object]]:
    """The objects of a service account, which the API server treats as it treats the operator's."""
    subject = {"kind": "ServiceAccount", "name": peer.name, "namespace": NAMESPACE}
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": peer.name, "namespace": NAMESPACE}}
    yield {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{NAMESPACE}-{peer.name}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [subject],
    }


def _configuration(peer: Peer, certificates: Path, webhook: int, probe: int) -> dict[str, object]:
    return {
        "apiVersion": f"{peer.group}/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{probe}"},
        "clientConnection": {"qps": 1000, "burst": 2000},
    }


def _certificates(plane: ControlPlane) -> Path:
    """Return a folder with a certificate for this machine. JobSet serves its webhooks even if nothing calls them."""
    folder = plane.state / "webhooks"
    folder.mkdir(exist_ok=True)
    for name, file in zip(("tls.crt", "tls.key"), plane.pki.certificate("apiserver"), strict=True):
        (folder / name).write_bytes(file.read_bytes())
    return folder


def _pod_labels(plane: ControlPlane, port: int) -> dict[str, object]:
    """Return LWS's webhook for pods, without which it does not know its pods.

    Its other webhooks, and all of JobSet's, set defaults and refuse mistakes: manifests here need neither.
    """
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "lws"},
        "webhooks": [
            {
                "name": "mpod.kb.io",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {
                    "url": f"https://127.0.0.1:{port}/mutate--v1-pod",
                    "caBundle": base64.b64encode(plane.pki.ca.read_bytes()).decode(),
                },
                "objectSelector": {
                    "matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]
                },
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
                "sideEffects": "None",
            }
        ],
    }
