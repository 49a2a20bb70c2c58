"""kube-proxy and CoreDNS, for service addresses and names: one of each for all nodes of this machine."""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster import binaries, network
from grpo_devcluster.process import Daemon
from grpo_devcluster.progress import wait_until

_COREFILE = """\
cluster.local in-addr.arpa {{
    bind {gateway}
    errors
    ready {gateway}:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
}}
. {{
    bind {gateway}
    errors
    # Names outside the cluster do not exist; a refusal instead would make resolvers retry.
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""


def corefile(kubeconfig: Path) -> str:
    """Return CoreDNS' configuration; records live a second, because pods that wait for each other ask again soon."""
    return _COREFILE.format(gateway=network.GATEWAY, kubeconfig=kubeconfig)


def coredns_rights() -> list[dict[str, Any]]:
    """Return the rights of CoreDNS to read services, pods and endpoints."""
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    api = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": "system:coredns"}, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"apiGroup": api, "kind": "User", "name": "system:coredns"}],
        },
    ]


def proxy_config(kubeconfig: Path, node: str) -> dict[str, Any]:
    """Return kube-proxy's configuration; all nodes share this machine's network, so one kube-proxy serves them."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": str(network.POD_RANGE),
        # Conntrack's limits belong to the machine.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s", "localhostNodePorts": False},
        "nodePortAddresses": ["primary"],
        "healthzBindAddress": f"{network.GATEWAY}:10256",
        "metricsBindAddress": f"{network.GATEWAY}:10249",
    }


def daemons(state: Path, config: Path, node: str) -> list[Daemon]:
    """Write the configuration of both programs below `config`, and return the programs."""
    _write(config / "Corefile", corefile(config / "coredns.kubeconfig"))
    _write(config / "kube-proxy.yaml", yaml.safe_dump(proxy_config(config / "kube-proxy.kubeconfig", node)))
    proxy = [str(binaries.binary("kube-proxy")), f"--config={config / 'kube-proxy.yaml'}"]
    dns = [str(binaries.binary("coredns")), "-conf", str(config / "Corefile")]
    return [Daemon("kube-proxy", proxy, state), Daemon("coredns", dns, state)]


def _write(path: Path, text: str) -> None:
    # kube-proxy exits when its file is written, even with the same content.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def wait_ready(programs: list[Daemon]) -> None:
    """Wait until names resolve and the rules for service addresses exist."""
    for daemon, url in zip(
        programs, (f"http://{network.GATEWAY}:10256/healthz", f"http://{network.GATEWAY}:8181/ready"), strict=True
    ):
        wait_until(lambda daemon=daemon, url=url: _healthy(daemon, url), daemon.name, timeout=60)  # type: ignore[misc]


def _healthy(daemon: Daemon, url: str) -> bool:
    daemon.require()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
