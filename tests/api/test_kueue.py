"""Jobs in a queue of Kueue: the real Kueue, its webhooks and its scheduler, next to a real API server and scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane import kueue
from support.control_plane.fake_nodes import fake_nodes
from support.control_plane.operators import Jobs, bind_claim, finish_download, make_job

pytestmark = pytest.mark.long

GPU = "nvidia.com/gpu"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
NODES = [f"kwok-{number}" for number in range(310, 314)]

CLUSTER = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: kept}
spec:
  nodeLabels: {only: kueue}
  tolerations: [{key: kept, operator: Exists, effect: NoSchedule}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {name: racks}
spec:
  levels: [{nodeLabel: rack}, {nodeLabel: kubernetes.io/hostname}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: racks}
spec:
  nodeLabels: {only: kueue}
  topologyName: racks
  tolerations: [{key: kept, operator: Exists, effect: NoSchedule}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: urgent}
value: 100
"""


@pytest.fixture(scope="module", autouse=True)
def cluster(control_plane: ControlPlane, operator: Any, kubectl: Any) -> Iterator[None]:
    """Kueue, and four nodes of 8 GPUs in two racks that only its flavors lead to."""
    with (
        fake_nodes(kubectl, "kueue", numbers := range(310, 314), racks=2, kept=numbers),
        kueue.running(control_plane, kubectl, manageJobsWithoutQueueName=True),
    ):
        kubectl("apply", "-f", "-", stdin=CLUSTER)
        yield


@pytest.fixture
def queue(jobs: Jobs, kubectl: Any) -> Iterator[str]:
    """A ClusterQueue with a quota of 4 GPUs, and a LocalQueue for it."""
    yield from _queue(jobs, kubectl, "kept", 4)


def _queue(jobs: Jobs, kubectl: Any, flavor: str, gpus: int) -> Iterator[str]:
    name, kind = jobs.namespace, {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    quota = {"cpu": "1000", "memory": "1Ti", GPU: gpus}  # of all that pods request
    quotas = [{"name": flavor, "resources": [{"name": name, "nominalQuota": most} for name, most in quota.items()]}]
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": list(quota), "flavors": quotas}],
    }
    made = kind | {"kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(made))
    jobs.apply(kind | {"kind": "LocalQueue", "metadata": {"name": "team"}, "spec": {"clusterQueue": name}})
    yield name
    kubectl("delete", "clusterqueue", name, "--wait=false")


def _queued(name: str, *, priority: str = "", **spec: Any) -> dict[str, Any]:
    made = make_job(name, **spec)
    made["metadata"]["labels"] = {QUEUE: "team"} | ({PRIORITY: priority} if priority else {})
    return made


def _wait_for_usage(jobs: Jobs, gpus: int) -> None:
    """Wait until so many GPUs of the quota are reserved."""

    def reserved() -> int:
        found = jobs.get("clusterqueue", jobs.namespace)["status"].get("flavorsReservation") or []
        return sum(int(one["total"]) for flavor in found for one in flavor["resources"] if one["name"] == GPU)

    wait_until(lambda: reserved() == gpus, f"{gpus} GPUs of the quota are reserved", 60, interval=0.2)


def _workload(jobs: Jobs, job: str) -> dict[str, Any]:
    (found,) = jobs.list("workloads.kueue.x-k8s.io", f"training.grpo.dev/job={job}")
    found["conditions"] = {c["type"]: (c["status"], c["reason"]) for c in found.get("status", {}).get("conditions", [])}
    return found


def _wait(jobs: Jobs, name: str, reason: str, phase: str = "Pending") -> dict[str, Any]:
    def state() -> bool:
        status = jobs.status(name)
        return (status.get("phase"), status.get("summary", {}).get("reason")) == (phase, reason)

    wait_until(state, f"{name} is {phase}: {reason}", 60, interval=0.2)
    return jobs.status(name)


def test_environment_pods_are_admitted_with_the_job_and_their_quota_is_given_back(jobs: Jobs, queue: str) -> None:
    groups = [{"name": "boxes", "replicas": 2}]
    jobs.apply(_queued("acts", tools=[{"function": "m:f"}], environmentPods={"groups": groups}))
    jobs.wait_for("acts", "Running", "True")
    sets = _workload(jobs, "acts")["spec"]["podSets"]
    assert [(one["name"], one["count"]) for one in sets] == [("a", 1), ("b", 1), ("boxes", 2)]
    assert sorted(jobs.pods("acts")) == ["acts-a-0", "acts-b-0", "acts-boxes-0", "acts-boxes-1"]
    assert {*jobs.nodes("acts")} <= {*NODES}
    jobs.edit("acts", suspend=True)
    jobs.wait_for("acts", "Suspended", "True")
    assert not jobs.pods("acts")
    wait_until(lambda: not jobs.list("workloads.kueue.x-k8s.io"), "its Workload is deleted", 60, interval=0.2)


def test_a_job_waits_without_pods_until_its_quota_is_free_and_gives_it_back_when_it_ends(
    jobs: Jobs, queue: str
) -> None:
    jobs.apply(_queued("first"))
    jobs.wait_for("first", "Running", "True")
    wait_until(lambda: _workload(jobs, "first")["conditions"].get("PodsReady") == ("True", "Started"), "PodsReady", 60)
    assert [(one["name"], one["count"]) for one in _workload(jobs, "first")["spec"]["podSets"]] == [("a", 1), ("b", 1)]
    _wait_for_usage(jobs, 3)
    assert {*jobs.nodes("first")} <= {*NODES}
    assert jobs.status("first")["admission"]["clusterQueue"] == queue
    assert len(jobs.list("workloads.kueue.x-k8s.io")) == 1, "StatefulSets and pods have none of their own"

    jobs.apply(_queued("second"))
    waiting = _wait(jobs, "second", "Queued")
    words = "waits in LocalQueue team as Workload second-"

    def said() -> bool:
        message = jobs.status("second")["summary"]["message"]
        return message.startswith(words) and "insufficient unused quota for nvidia.com/gpu" in message

    wait_until(said, "the job quotes Kueue", 60, interval=0.2)
    assert ("attempt" in waiting, jobs.pods("second")) == (False, {})

    jobs.succeed("first-a-0", "first-b-0")
    jobs.wait_for("second", "Running", "True")
    assert _workload(jobs, "first")["conditions"]["Finished"] == ("True", "Succeeded")
    _wait_for_usage(jobs, 3)


def test_an_evicted_job_stops_gives_its_quota_back_and_goes_on_once_it_is_admitted_again(
    jobs: Jobs, queue: str
) -> None:
    jobs.apply(_queued("low"))
    jobs.wait_for("low", "Running", "True")
    jobs.apply(_queued("high", priority="urgent"))
    evicted = _wait(jobs, "low", "Queued")
    said = [one["note"] for one in jobs.list("events.events.k8s.io") if one["reason"] == "Suspending"]
    assert any(note.startswith("Kueue takes its quota back (Preempted)") for note in said), said
    assert (evicted["restarts"]["total"], "admission" in evicted, jobs.pods("low")) == (0, False, {})
    jobs.wait_for("high", "Running", "True")
    assert _workload(jobs, "high")["spec"]["priority"] == 100
    conditions = _workload(jobs, "low")["conditions"]
    assert conditions["Evicted"] == ("True", "Preempted")
    assert conditions["Requeued"] == ("True", "Preempted")
    assert (conditions["QuotaReserved"][0], conditions["Admitted"][0]) == ("False", "False")
    _wait_for_usage(jobs, 3)

    jobs.succeed("high-a-0", "high-b-0")
    jobs.wait_for("low", "Running", "True")
    assert jobs.status("low")["attempt"] == 1
    assert _workload(jobs, "low")["conditions"]["Evicted"][0] == "False"


def test_a_deactivated_workload_stops_the_job_until_it_is_active_again(jobs: Jobs, queue: str) -> None:
    jobs.apply(_queued("held"))
    jobs.wait_for("held", "Running", "True")
    name = _workload(jobs, "held")["metadata"]["name"]
    jobs("patch", "workloads.kueue.x-k8s.io", name, "--type=merge", "-p", '{"spec": {"active": false}}')
    stopped = _wait(jobs, "held", "Queued")
    assert "is deactivated" in stopped["summary"]["message"]
    _wait_for_usage(jobs, 0)
    jobs("patch", "workloads.kueue.x-k8s.io", name, "--type=merge", "-p", '{"spec": {"active": true}}')
    jobs.wait_for("held", "Running", "True")


def test_topology_key_is_kueues_to_place_one_rack_and_nodes_in_the_order_of_ordinals(jobs: Jobs, kubectl: Any) -> None:
    for _ in _queue(jobs, kubectl, "racks", 32):
        near = {"topologyKey": "rack", "topologyPolicy": "Required"}
        groups = [{"name": "a", "replicas": 2, "gpus": 8}]
        jobs.apply(_queued("near", trainer={"groups": groups}, scheduling=near))
        jobs.wait_for("near", "Running", "True")
        pods = [pod for _, pod in sorted(jobs.pods("near").items())]
        placed = [pod["spec"]["nodeName"] for pod in pods]
        assert placed in (["kwok-310", "kwok-312"], ["kwok-311", "kwok-313"]), placed
        assert all(pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] in placed for pod in pods)


def test_a_download_begins_once_the_job_is_admitted_and_kueue_leaves_it_alone(jobs: Jobs, queue: str) -> None:
    bind_claim(jobs, "models")
    jobs.apply(_queued("large", trainer={"groups": [{"name": "a", "replicas": 1, "gpus": 4}]}))
    jobs.wait_for("large", "Running", "True")
    jobs.apply(_queued("fetched", cache={"claimName": "models", "prefetch": True}))
    _wait(jobs, "fetched", "Queued")
    assert jobs.list("job") == []
    jobs.succeed("large-a-0")
    _wait(jobs, "fetched", "Downloading")
    finish_download(jobs, "fetched")
    jobs.wait_for("fetched", "Running", "True")
    _wait_for_usage(jobs, 3)
