"""Fixtures of the end-to-end tests: one real cluster for all of them; tests are separated by namespace."""

import uuid
from collections.abc import Callable

import pytest

from grpo_demo.cluster import install_operator
from grpo_demo.kubectl import Kubectl as DemoKubectl
from grpo_devcluster import images, storage
from grpo_devcluster.cluster import Cluster
from support.cluster import reads
from support.cluster.jobs_on_cluster import JobOnCluster

Kubectl = Callable[..., str]

WHEN_FAILED = (
    ("get", "grpojobs", "-A", "-o", "yaml"),
    ("get", "pods,nodes,leases", "-A", "-o", "wide"),
    ("get", "events", "-A", "--sort-by=.lastTimestamp"),
    ("logs", "-n", "grpo-system", "-l", "app.kubernetes.io/name=grpo-operator", "--prefix", "--tail=300"),
)
"""Facts about the cluster that the report of a failed test shows; it is gone when somebody reads it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    kubectl: Kubectl | None = getattr(item, "funcargs", {}).get("kubectl")
    if report.failed and kubectl is not None:
        for args in WHEN_FAILED:
            try:
                report.sections.append((f"kubectl {' '.join(args)}", kubectl(*args)))
            except RuntimeError as error:
                report.sections.append((f"kubectl {' '.join(args)} failed", str(error)))
    return report


@pytest.fixture(scope="session")
def devcluster():
    """The machine's cluster: node-a has two GPUs, node-b one. A cluster that runs already is used and left running."""
    cluster = Cluster()
    was_running = cluster.running()
    cluster.up("a=2,b=1")
    yield cluster
    if not was_running:
        cluster.down()


@pytest.fixture(scope="session")
def cluster(devcluster):
    """Kubeconfig of the cluster."""
    return devcluster.kubeconfig


@pytest.fixture(scope="session")
def kubectl(cluster):
    return reads.Kubectl(cluster)


@pytest.fixture(scope="session")
def operator(devcluster):
    """The operator, installed by its chart from the image of this checkout."""
    archive = images.build_operator()
    devcluster.load(archive)
    install_operator(DemoKubectl(devcluster.kubeconfig), archive)


@pytest.fixture
def namespace(cluster, kubectl):
    """A namespace for one test."""
    yield from _namespace(cluster, kubectl)


def _namespace(cluster, kubectl):
    """Create a namespace; in the end delete it and wait for its pods, so that the next test finds the GPUs free."""
    storage.recycle(cluster)
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")
    kubectl("delete", "pod", "--all", "-n", name, "--grace-period=1", "--wait=false")
    kubectl("wait", "pod", "--all", "-n", name, "--for=delete", "--timeout=240s")


@pytest.fixture
def job(operator, kubectl, cluster, namespace):
    """The job of one test, in its own namespace, with an operator at work."""
    return JobOnCluster(kubectl, cluster, namespace)


@pytest.fixture(scope="module")
def module_job(operator, kubectl, cluster):
    """The job that all tests of a module share: starting one takes most of a test's time."""
    for name in _namespace(cluster, kubectl):
        yield JobOnCluster(kubectl, cluster, name)
