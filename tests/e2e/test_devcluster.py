"""The nodes of the devcluster do what the end-to-end tests of the operator rely on.

Asserted: nodes are ready with their GPUs; pods meet across nodes and share a claim; exit codes are reported; host
mounts reach only pods of jobs and cover no mount of the pod; a killed node is noticed and comes back.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_devcluster import images, policies, storage
from grpo_devcluster.cluster import Cluster
from grpo_devcluster.progress import wait_until

Kubectl = Callable[..., str]

# Runs in each pod on the mounted interpreter: reaches all peers by name, then the API server by its service address.
MEET = """
import os, socket, time
deadline = time.monotonic() + 120
server = socket.create_server(("", 29500))
for peer in [f"meet-{i}.meet" for i in range(3)]:
    while True:
        try:
            socket.create_connection((peer, 29500), 2).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
socket.create_connection((os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])), 5).close()
open(f"/store/{socket.gethostname()}", "w").write(str(os.getuid()))
print("met", flush=True)
time.sleep(3600)
"""


def pod_spec(code: str, gpus: int) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": images.WORKLOAD,
        "command": ["python", "-c", code],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": user,
        "containers": [container],
    }


def claim(name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def meeting() -> list[dict[str, Any]]:
    labels = {"app": "meet", policies.JOB_LABEL: "meet"}
    spec = pod_spec(MEET, gpus=1)
    spec["containers"][0]["volumeMounts"] = [{"name": "store", "mountPath": "/store"}]
    spec["volumes"] = [{"name": "store", "persistentVolumeClaim": {"claimName": "store"}}]
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app": "meet"},
        "ports": [{"port": 29500}],
    }
    stateful_set = {
        "replicas": 3,
        "serviceName": "meet",
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "meet"}, "spec": service},
        claim("store"),
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "meet"}, "spec": stateful_set},
    ]


def apply(kubectl: Kubectl, namespace: str, *manifests: dict[str, Any]) -> None:
    kubectl(
        "apply", "-n", namespace, "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    )


def test_nodes_are_ready_with_their_gpus(kubectl: Kubectl) -> None:
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    assert {n["metadata"]["name"]: n["status"]["allocatable"]["nvidia.com/gpu"] for n in nodes} == {
        "node-a": "2",
        "node-b": "1",
    }


def test_pods_of_one_set_meet_across_nodes_and_share_a_claim(cluster: Path, kubectl: Kubectl, namespace: str) -> None:
    apply(kubectl, namespace, *meeting())
    pods = [f"meet-{i}" for i in range(3)]
    kubectl("wait", "pod", "-n", namespace, "-l", "app=meet", "--for=condition=Ready", "--timeout=120s")
    for pod in pods:
        wait_until(lambda pod=pod: "met" in kubectl("logs", "-n", namespace, pod), f"{pod} met its peers", timeout=120)

    nodes = kubectl("get", "pods", "-n", namespace, "-o", "jsonpath={.items[*].spec.nodeName}").split()
    assert sorted(nodes) == ["node-a", "node-a", "node-b"]
    folder = storage.claim_path(cluster, namespace, "store")
    assert {f.name: f.read_text() for f in folder.iterdir()} == {pod: "65532" for pod in pods}


def test_an_exit_code_and_its_message_are_reported(kubectl: Kubectl, namespace: str) -> None:
    spec = pod_spec("import sys, yaml; sys.exit('it ended')", gpus=1) | {"restartPolicy": "Never"}
    spec["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    apply(
        kubectl,
        namespace,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "ends", "labels": {policies.JOB_LABEL: "ends"}},
            "spec": spec,
        },
    )
    kubectl("wait", "pod/ends", "-n", namespace, "--for=jsonpath={.status.phase}=Failed", "--timeout=120s")
    status = json.loads(kubectl("get", "pod", "ends", "-n", namespace, "-o", "json"))["status"]["containerStatuses"][0]
    ended = status["state"]["terminated"]
    assert (ended["exitCode"], ended["message"].strip()) == (1, "it ended")


def test_a_pod_without_the_job_label_gets_no_host_mounts(kubectl: Kubectl) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"}, "spec": pod_spec("pass", gpus=0)}
    answer = json.loads(kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod)))
    assert "volumes" not in answer["spec"]


def test_a_mount_that_the_pod_sets_takes_precedence(kubectl: Kubectl) -> None:
    spec = pod_spec("pass", gpus=0)
    spec["containers"][0]["volumeMounts"] = [{"name": "own", "mountPath": "/usr"}]
    spec["containers"][0]["env"] = [{"name": "OMP_NUM_THREADS", "value": "2"}]
    spec["volumes"] = [{"name": "own", "emptyDir": {}}]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "own", "labels": {policies.JOB_LABEL: "own"}},
        "spec": spec,
    }
    answer = json.loads(kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod)))["spec"][
        "containers"
    ][0]

    mounts = {m["mountPath"]: m["name"] for m in answer["volumeMounts"]}
    assert mounts["/usr"] == "own"
    assert "/bin" in mounts
    environment = {e["name"]: e["value"] for e in answer["env"]}
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_killed_node_is_noticed_and_comes_back(devcluster: Cluster, kubectl: Kubectl) -> None:
    devcluster.node("b").stop()
    kubectl("wait", "node/node-b", "--for=condition=Ready=Unknown", "--timeout=120s")

    devcluster.start_node("b")
    kubectl("wait", "node/node-b", "--for=condition=Ready", "--timeout=120s")
    assert kubectl("get", "node", "node-b", "-o", "jsonpath={.status.allocatable.nvidia\\.com/gpu}") == "1"
