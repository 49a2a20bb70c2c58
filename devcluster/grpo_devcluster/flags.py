"""Command lines of the control plane, made by pure functions."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo_devcluster.pki import Pki

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"


@dataclass(frozen=True)
class Endpoints:
    """Address and ports of a control plane."""

    address: str
    apiserver: int
    etcd: int
    etcd_peer: int

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.apiserver}"


@dataclass(frozen=True)
class Features:
    """Features for a test to switch: gates of every component, API versions of the API server."""

    gates: Mapping[str, bool] = field(default_factory=dict)
    runtime_config: Mapping[str, bool] = field(default_factory=dict)

    def gate_flags(self) -> list[str]:
        return [f"--feature-gates={_pairs(self.gates)}"] if self.gates else []

    def runtime_flags(self) -> list[str]:
        return [f"--runtime-config={_pairs(self.runtime_config)}"] if self.runtime_config else []


def _pairs(values: Mapping[str, bool]) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in sorted(values.items()))


def etcd(endpoints: Endpoints, data: Path) -> list[str]:
    """Return the arguments of etcd: loopback only, and no fsync, because its data ends with the cluster."""
    client, peer = f"http://127.0.0.1:{endpoints.etcd}", f"http://127.0.0.1:{endpoints.etcd_peer}"
    return [
        "--name=default",
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
    ]


def apiserver(endpoints: Endpoints, pki: Pki, features: Features, audit: tuple[Path, Path] | None) -> list[str]:
    """Return the arguments of kube-apiserver; `audit` is the policy and the log file."""
    certificate, key = pki.certificate("apiserver")
    kubelet_certificate, kubelet_key = pki.certificate("apiserver-kubelet-client")
    return [
        f"--etcd-servers=http://127.0.0.1:{endpoints.etcd}",
        f"--bind-address={endpoints.address}",
        f"--advertise-address={endpoints.address}",
        f"--secure-port={endpoints.apiserver}",
        f"--tls-cert-file={certificate}",
        f"--tls-private-key-file={key}",
        f"--client-ca-file={pki.ca}",
        f"--token-auth-file={pki.tokens}",
        f"--kubelet-client-certificate={kubelet_certificate}",
        f"--kubelet-client-key={kubelet_key}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        # As on OpenShift: creating children that block the deletion of their owner needs rights to its finalizers.
        "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--service-account-key-file={pki.service_account_public}",
        f"--service-account-signing-key-file={pki.service_account_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--allow-privileged=true",
        *_reconciler(endpoints.address),
        *features.gate_flags(),
        *features.runtime_flags(),
        *(_audit(*audit) if audit else []),
    ]


def _reconciler(address: str) -> list[str]:
    # An address of loopback cannot be an endpoint of the Service `kubernetes`; from 1.37 on, the server does not start.
    return ["--endpoint-reconciler-type=none"] if ipaddress.ip_address(address).is_loopback else []


def _audit(policy: Path, log: Path) -> list[str]:
    # Rotated at 64 GiB, which means never: tests and benchmarks read all of it.
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-maxsize=65536"]


def controller_manager(kubeconfig: Path, pki: Pki, features: Features, *, fake_nodes: bool) -> list[str]:
    """Return the arguments of kube-controller-manager: rates for many pods, and a lost node is noticed in seconds.

    Fake nodes are not lost when their one program is slow: nothing would make their pods ready again.
    """
    return [
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        # A user per controller, so that the audit log shows which controller wrote.
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki.service_account_key}",
        f"--root-ca-file={pki.ca}",
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        "--concurrent-statefulset-syncs=20",
        "--concurrent-job-syncs=20",
        "--node-monitor-period=2s",
        f"--node-monitor-grace-period={'1h' if fake_nodes else '20s'}",
        "--secure-port=0",
        *features.gate_flags(),
    ]


def scheduler(config: Path, features: Features) -> list[str]:
    """Return the arguments of kube-scheduler."""
    return [f"--config={config}", "--secure-port=0", *features.gate_flags()]


def scheduler_config(kubeconfig: Path) -> dict[str, object]:
    """Return the scheduler's configuration: it takes its rates only from a file."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 2000},
        "leaderElection": {"leaderElect": False},
    }


def audit_policy() -> dict[str, object]:
    """Return the audit policy: who did what to which object, once per request."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }
