"""The control plane of the tests works as the operator's tests need it: version, fake GPUs, StatefulSets, audit log."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until

pytestmark = pytest.mark.api

Kubectl = Callable[..., str]


def stateful_set(namespace: str, name: str, replicas: int, gpus: int) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "main", "image": "example.invalid/any", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def apply_ready(kubectl: Kubectl, namespace: str, name: str, replicas: int = 3) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps(stateful_set(namespace, name, replicas, gpus=2)))
    path = "jsonpath={.status.readyReplicas}"
    wait_until(
        lambda: kubectl("get", "statefulset", name, "-n", namespace, "-o", path) == str(replicas),
        f"{replicas} ready pods of {name}",
        timeout=30,
    )


def test_reports_the_pinned_version(kubectl: Kubectl, pytestconfig: pytest.Config) -> None:
    pinned = "v1.30.14" if pytestconfig.getoption("oldest") else "v1.37.2"
    assert json.loads(kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == pinned


def test_fake_nodes_have_gpus(kubectl: Kubectl) -> None:
    nodes = json.loads(kubectl("get", "nodes", "-l", "type=kwok", "-o", "json"))["items"]
    assert [n["status"]["allocatable"]["nvidia.com/gpu"] for n in nodes] == ["8"] * 8


def test_stateful_set_becomes_ready(kubectl: Kubectl, namespace: str) -> None:
    apply_ready(kubectl, namespace, "ready")


def test_a_termination_written_by_a_test_stays(kubectl: Kubectl, namespace: str) -> None:
    apply_ready(kubectl, namespace, "ends")
    state = {"terminated": {"exitCode": 3, "message": "why"}}
    status = {"name": "main", "image": "any", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    patch = json.dumps({"status": {"containerStatuses": [status]}})
    kubectl("patch", "pod", "ends-0", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)

    # kwok handles a later change of another pod: it has left the patched one alone.
    kubectl("delete", "pod", "ends-1", "-n", namespace)
    kubectl("wait", "pod/ends-1", "-n", namespace, "--for=condition=Ready", "--timeout=30s")

    pod = json.loads(kubectl("get", "pod", "ends-0", "-n", namespace, "-o", "json"))
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


def test_audit_log_names_the_writer(control_plane: ControlPlane, kubectl: Kubectl, namespace: str) -> None:
    kubectl("create", "configmap", "seen", "-n", namespace)

    def written_by_admin() -> bool:
        events = [json.loads(line) for line in control_plane.audit_log.read_text().splitlines() if "seen" in line]
        return any(
            e["user"]["username"] == "admin" and e["verb"] == "create" and e["objectRef"].get("namespace") == namespace
            for e in events
        )

    wait_until(written_by_admin, "the write in the audit log", timeout=30)
