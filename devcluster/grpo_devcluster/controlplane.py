"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes of this machine; needs no nodes."""

import contextlib
import json
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml
from kubernetes.client.exceptions import ApiException

from grpo_devcluster import binaries, flags, kube, kwok
from grpo_devcluster.flags import Endpoints, Features
from grpo_devcluster.pki import Pki
from grpo_devcluster.process import Daemon
from grpo_devcluster.progress import wait_until


class ControlPlane:
    """A control plane below `state`; several can run side by side.

    As a context manager it starts on entry; on exit it ends and removes its state, except logs. A detached one survives
    the process that started it, and a later instance with the same `state` finds it running. With `oldest` it is of the
    oldest Kubernetes that the chart allows.
    """

    def __init__(
        self,
        state: Path,
        *,
        kwok_nodes: int = 0,
        kwok_gpus: int = 8,
        feature_gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
        audit: bool = True,
        address: str = "127.0.0.1",
        port: int = 0,
        nodes: Sequence[str] = (),
        detached: bool = False,
        oldest: bool = False,
    ) -> None:
        self.state = state
        self.kubeconfig = state / "kubeconfig"
        self.audit_log = state / "logs" / "audit.jsonl"
        self.pki = Pki(state / "pki")
        self._kwok_nodes, self._kwok_gpus = kwok_nodes, kwok_gpus
        self._features = Features(feature_gates or {}, runtime_config or {})
        self._audit = audit
        self._address = address
        self._port = port
        self._nodes = nodes
        self._detached = detached
        self._oldest = oldest

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def endpoints(self) -> Endpoints:
        """Return the ports, which are chosen at the first start and kept for later ones."""
        file = self.state / "endpoints.json"
        if not file.exists():
            apiserver, etcd, peer = _free_ports(3)
            file.write_text(json.dumps(asdict(Endpoints(self._address, self._port or apiserver, etcd, peer))))
        return Endpoints(**json.loads(file.read_text()))

    def daemons(self) -> list[Daemon]:
        """Return the programs in the order of their start."""
        audit = (self.state / "audit-policy.yaml", self.audit_log) if self._audit else None
        arguments = {
            "etcd": flags.etcd(self.endpoints, self.state / "etcd"),
            "kube-apiserver": flags.apiserver(self.endpoints, self.pki, self._features, audit),
            "kube-controller-manager": flags.controller_manager(
                self._config("kube-controller-manager"), self.pki, self._features, fake_nodes=bool(self._kwok_nodes)
            ),
            "kube-scheduler": flags.scheduler(self.state / "scheduler.yaml", self._features),
        }
        found = [
            Daemon(name, [str(binaries.binary(name, oldest=self._oldest)), *args], self.state, detached=self._detached)
            for name, args in arguments.items()
        ]
        if self._kwok_nodes:
            found.append(kwok.daemon(self.state, self._config("kwok"), detached=self._detached))
        return found

    def start(self) -> None:
        """Start the programs that do not run, and return when pods can be created."""
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "logs").mkdir(exist_ok=True)
        self._write_configuration()
        etcd, apiserver, *others = self.daemons()
        etcd.start()
        apiserver.start()
        self._wait(self._ready, "kube-apiserver", [etcd, apiserver], timeout=120)
        for daemon in others:
            daemon.start()
        if self._kwok_nodes:
            kube.apply(self.kubeconfig, [kwok.node(i, self._kwok_gpus) for i in range(self._kwok_nodes)])
        # Pods are refused until the controller manager has created the namespace's service account.
        self._wait(self._service_account, "service account", others, timeout=60)
        if self._kwok_nodes:
            self._wait(self._nodes_ready, f"{self._kwok_nodes} fake nodes", others, timeout=60)

    def stop(self) -> None:
        """End the programs and remove the state, except logs."""
        if not (self.state / "endpoints.json").exists():
            return
        for daemon in reversed(self.daemons()):
            # Their state is removed, so no program has to end in good order.
            daemon.stop(grace=0)
        for folder in ("etcd", "pki", "config", "run"):
            shutil.rmtree(self.state / folder, ignore_errors=True)
        for file in ("endpoints.json", "kubeconfig", "scheduler.yaml", "audit-policy.yaml", "stages.yaml"):
            (self.state / file).unlink(missing_ok=True)

    def _config(self, user: str) -> Path:
        return self.state / "config" / f"{user}.kubeconfig"

    def _write_configuration(self) -> None:
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        self.pki.create([*names, "localhost", "127.0.0.1", flags.SERVICE_IP, self._address], self._nodes)
        server = self.endpoints.server
        (self.state / "config").mkdir(exist_ok=True, mode=0o700)
        self.pki.kubeconfig("admin", server, self.kubeconfig)
        for user in ["kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns", "kwok"]:
            self.pki.kubeconfig(user, server, self._config(user))
        for node in self._nodes:
            self.pki.kubeconfig(f"kubelet-{node}", server, self._config(f"kubelet-{node}"))
        (self.state / "audit-policy.yaml").write_text(yaml.safe_dump(flags.audit_policy()))
        scheduler = flags.scheduler_config(self._config("kube-scheduler"))
        (self.state / "scheduler.yaml").write_text(yaml.safe_dump(scheduler))

    def _wait(self, check: Callable[[], bool], what: str, needed: Sequence[Daemon], timeout: float) -> None:
        def check_all() -> bool:
            for daemon in needed:
                daemon.require()
            return check()

        wait_until(check_all, what, timeout)

    def _ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.pki.ca))
        request = urllib.request.Request(f"{self.endpoints.server}/readyz")
        request.add_header("Authorization", f"Bearer {self.pki.token('admin')}")
        # Without a proxy from the environment, which cannot reach this machine's addresses.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with contextlib.suppress(OSError, urllib.error.URLError), opener.open(request, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _service_account(self) -> bool:
        try:
            kube.core(self.kubeconfig).read_namespaced_service_account("default", "default")
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def _nodes_ready(self) -> bool:
        nodes = kube.core(self.kubeconfig).list_node(label_selector="type=kwok").items
        return len([n for n in nodes if kube.is_ready(n)]) >= self._kwok_nodes


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
