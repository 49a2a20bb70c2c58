"""One control plane for all API tests: tests keep apart by namespace."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import audit
import pytest
from launcher import free_ports
from operator_fixture import Jobs, Operator, Release, install_chart

from grpo_devcluster import binaries, kube
from grpo_devcluster.controlplane import ControlPlane

Kubectl = Callable[..., str]


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real API server, controller manager and scheduler, with 8 fake nodes of 8 GPUs each."""
    binaries.build("controlplane")
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), kwok_nodes=8) as plane:
        yield plane


@pytest.fixture(scope="session")
def kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.kubeconfig


@pytest.fixture(scope="session")
def kubectl(kubeconfig: Path) -> Kubectl:
    """`kubectl("get", "pods", stdin=...)`: its output, or a RuntimeError with its complaint."""

    def run(*args: str, stdin: str | None = None) -> str:
        return kube.kubectl(kubeconfig, *args, stdin=stdin)

    return run


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """A namespace of the test's own, removed after it without waiting."""
    yield from _namespace(kubectl)


@pytest.fixture
def other_namespace(kubectl: Kubectl) -> Iterator[str]:
    """One more."""
    yield from _namespace(kubectl)


def _namespace(kubectl: Kubectl) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def release(control_plane: ControlPlane, kubectl: Kubectl) -> Release:
    """A cluster-wide installation."""
    return install_chart(control_plane, kubectl)


@pytest.fixture(scope="session")
def operator(control_plane: ControlPlane, release: Release) -> Iterator[Operator]:
    """The operator, running. Whatever the tests made it do, its roles allowed."""
    log = control_plane.state / "logs" / "operator.log"
    process = Operator(release.kubeconfig, log, release.arguments, metrics_port=free_ports(1)[0])
    process.start()
    yield process
    process.kill()
    assert audit.denials(control_plane.audit_log, release.user) == []


@pytest.fixture
def jobs(operator: Operator, kubectl: Kubectl, namespace: str) -> Jobs:
    """GRPOJobs in the test's own namespace, with the operator running."""
    operator.start()
    return Jobs(kubectl, namespace)
