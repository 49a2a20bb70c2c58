"""Properties of the devcluster that the operator's end-to-end tests rely on, and would not notice by themselves.

Asserted: host mounts reach only pods of jobs and cover no mount of the pod; a killed node is noticed and comes back.
That nodes have GPUs, pods meet across nodes and share a claim, and exit codes are reported: test_job.py.
"""

import json

from grpo_devcluster import images, policies


def created(kubectl, labels, container, **spec):
    """Return the spec of a pod as the API server would store it."""
    metadata = {"name": "own", "labels": labels}
    whole = {"containers": [{"name": "main", "image": images.WORKLOAD, **container}], **spec}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"automountServiceAccountToken": False} | whole,
    }
    answer = json.loads(kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod)))
    return dict(answer["spec"])


def test_host_mounts_are_for_pods_of_jobs_and_a_mount_that_the_pod_sets_takes_precedence(kubectl):
    assert "volumes" not in created(kubectl, {}, {})
    own = {
        "volumeMounts": [{"name": "own", "mountPath": "/usr"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "2"}],
    }
    spec = created(kubectl, {policies.JOB_LABEL: "own"}, own, volumes=[{"name": "own", "emptyDir": {}}])
    (container,) = spec["containers"]
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert mounts["/usr"] == "own"
    assert "/bin" in mounts
    environment = {e["name"]: e["value"] for e in container["env"]}
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_killed_node_is_noticed_and_comes_back(devcluster, kubectl):
    devcluster.node("b").stop()
    kubectl("wait", "node/node-b", "--for=condition=Ready=Unknown", "--timeout=120s")

    devcluster.start_node("b")
    kubectl("wait", "node/node-b", "--for=condition=Ready", "--timeout=120s")
    assert kubectl("get", "node", "node-b", "-o", "jsonpath={.status.allocatable.nvidia\\.com/gpu}") == "1"
