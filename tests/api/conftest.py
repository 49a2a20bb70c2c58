"""One control plane for all API tests; each test has its own namespace."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from grpo_cli.main import main
from grpo_devcluster import binaries, packages
from grpo_devcluster.controlplane import ControlPlane
from support.cluster import reads
from support.control_plane import audit, kueue
from support.control_plane.operators import Jobs, Operator, Release, install_chart
from support.trainer.launchers import free_ports

Kubectl = Callable[..., str]

GANG_GATES = {"GenericWorkload": True}
GANG_API = {"scheduling.k8s.io/v1beta1": True}


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ControlPlane]:
    """A real API server, controller manager and scheduler, with 8 fake nodes of 8 GPUs each.

    Gang scheduling is on, unless they are of the oldest Kubernetes (--oldest), which has none.
    """
    oldest = pytestconfig.getoption("oldest")
    binaries.build("controlplane")
    if oldest:
        binaries.build("oldest")
    gang: dict[str, Any] = {} if oldest else {"feature_gates": GANG_GATES, "runtime_config": GANG_API}
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), kwok_nodes=8, oldest=oldest, **gang) as plane:
        yield plane


@pytest.fixture(scope="session")
def kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.kubeconfig


@pytest.fixture(scope="session")
def kubectl(kubeconfig: Path) -> Kubectl:
    return reads.Kubectl(kubeconfig)


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """A namespace for one test; its deletion is not waited for."""
    yield from _namespace(kubectl)


@pytest.fixture
def other_namespace(kubectl: Kubectl) -> Iterator[str]:
    """A second namespace for the same test."""
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
def operator(control_plane: ControlPlane, release: Release, kubectl: Kubectl) -> Iterator[Operator]:
    """The running operator. At the end no request of it may have been denied by its roles."""
    log = control_plane.state / "logs" / "operator.log"
    kueue.install_crds(kubectl)
    process = Operator(release.kubeconfig, log, release.arguments, metrics_port=free_ports(1)[0])
    process.start()
    yield process
    process.kill()
    assert audit.denials(control_plane.audit_log, release.user) == []


@pytest.fixture
def jobs(operator: Operator, kubectl: Kubectl, namespace: str) -> Jobs:
    """GRPOJobs in the test's namespace, with the operator running."""
    operator.start()
    return Jobs(kubectl, namespace)


@pytest.fixture
def grpo(jobs: Jobs, kubeconfig: Path) -> Callable[..., Result]:
    """`grpo("status", "job")` in the test's namespace."""
    at = ["--kubeconfig", str(kubeconfig), "--namespace", jobs.namespace]
    return lambda *args: CliRunner().invoke(main, [*args, *at])


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """Headless Chromium."""
    packages.ensure(packages.BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = str(packages.find("chromium"))
    arguments = "headless=new no-sandbox disable-gpu disable-dev-shm-usage window-size=1300,950"
    for argument in arguments.split():
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(packages.find("chromedriver")))
    yield driver
    driver.quit()
