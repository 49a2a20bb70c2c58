"""One real cluster for all end-to-end tests; tests keep apart by namespace."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs_on_cluster import JobOnCluster

from grpo_demo.cluster import install_operator
from grpo_demo.kubectl import Kubectl as DemoKubectl
from grpo_devcluster import images, kube, storage
from grpo_devcluster.cluster import Cluster

Kubectl = Callable[..., str]


@pytest.fixture(scope="session")
def devcluster() -> Iterator[Cluster]:
    """The machine's cluster of two nodes, node-a with two GPUs and node-b with one; one that runs already is used and left."""
    cluster = Cluster()
    was_running = cluster.running()
    cluster.up("a=2,b=1")
    yield cluster
    if not was_running:
        cluster.down()


@pytest.fixture(scope="session")
def cluster(devcluster: Cluster) -> Path:
    """Kubeconfig of the cluster."""
    return devcluster.kubeconfig


@pytest.fixture(scope="session")
def kubectl(cluster: Path) -> Kubectl:
    """`kubectl("get", "pods", stdin=...)`: its output, or a RuntimeError with its complaint."""

    def run(*args: str, stdin: str | None = None) -> str:
        return kube.kubectl(cluster, *args, stdin=stdin)

    return run


@pytest.fixture(scope="session")
def operator(devcluster: Cluster) -> None:
    """The operator, installed by its chart from the image of this checkout."""
    archive = images.build_operator()
    devcluster.load(archive)
    install_operator(DemoKubectl(devcluster.kubeconfig), archive)


@pytest.fixture
def namespace(cluster: Path, kubectl: Kubectl) -> Iterator[str]:
    """A namespace of the test's own; the end of its pods is waited for, so that the next test finds the GPUs free."""
    storage.recycle(cluster)
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")
    kubectl("wait", "pod", "--all", "-n", name, "--for=delete", "--timeout=240s")


@pytest.fixture
def job(operator: None, kubectl: Kubectl, cluster: Path, namespace: str) -> JobOnCluster:
    """The job of a namespace with an operator at work."""
    return JobOnCluster(kubectl, cluster, namespace)
