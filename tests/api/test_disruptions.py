"""Pods that the cluster takes away, or finds no node for: the status names the cause, and whether the restart counts.

The API server, the controller manager and the scheduler are real.
"""

from typing import Any

from grpo_devcluster.progress import wait_until
from support.control_plane.fake_nodes import fake_nodes, set_priorities
from support.control_plane.operators import Jobs, make_job

WAITS = {"backoffSeconds": 3600, "maxBackoffSeconds": 3600}
LOW = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 83456Ki."


def _failure(jobs: Jobs, name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the failure that the job restarts after, its restarts, and the message of `kubectl get -o wide`."""
    jobs.wait_for(name, "Restarting", "True")
    status = jobs.status(name)
    return status["lastFailure"], status["restarts"], status["summary"]["message"]


def test_a_pod_evicted_by_its_kubelet_is_named_although_it_is_gone_within_milliseconds(jobs: Jobs) -> None:
    """The StatefulSet controller deletes a pod in phase Failed at once, and the API server grants no grace period."""
    jobs.run("squeezed", failurePolicy=WAITS)
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": LOW}
    jobs.report("squeezed-b-0", phase="Failed", reason="Evicted", message=LOW, conditions=[target])
    failure, restarts, message = _failure(jobs, "squeezed")
    assert (failure["reason"], failure["pod"], failure["counted"]) == ("Evicted", "squeezed-b-0", False)
    assert restarts == {"total": 1, "counted": 0}
    assert LOW in message


def test_a_pod_preempted_by_the_scheduler_is_named_and_not_counted(jobs: Jobs, kubectl: Any) -> None:
    set_priorities(kubectl, urgent=1000)
    kubectl("label", "node", "kwok-000", "only=preempted", "--overwrite")
    here = {"nodeSelector": {"only": "preempted"}}
    try:
        groups = [{"name": "a", "gpus": 1}]
        large = {"resources": {"requests": {"cpu": "60"}}}
        jobs.run("preempted", trainer={"groups": groups}, podTemplate=here | large, failurePolicy=WAITS)
        spec = here | {"priorityClassName": "urgent", "containers": [{"name": "c", "image": "i"} | large]}
        jobs.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": spec})
        failure, restarts, message = _failure(jobs, "preempted")
        assert (failure["reason"], failure["node"], restarts["counted"]) == ("Preempted", "kwok-000", 0)
        assert "higher priority" in message
        wait_until(lambda: jobs.get("pod", "urgent")["spec"].get("nodeName") == "kwok-000", "its place is taken", 60)
    finally:
        kubectl("label", "node", "kwok-000", "only-")
        jobs("delete", "pod", "urgent", "--ignore-not-found", "--wait=false")


def test_all_pods_of_a_job_are_in_one_rack_if_that_is_required_and_else_fill_racks(jobs: Jobs, kubectl: Any) -> None:
    """Racks of two nodes. Without the affinity the scheduler takes the emptiest nodes, which are in all racks."""

    def racks(name: str) -> list[int]:
        return sorted(int(node.removeprefix("kwok-")) % 4 for node in jobs.nodes(name))

    def apply(name: str, gpus: int, policy: str) -> None:
        groups = [{"name": "a", "replicas": 4, "gpus": gpus}]
        scheduling = {"topologyKey": "rack", "topologyPolicy": policy}
        template = {"nodeSelector": {"only": "racks"}}
        spec = {"trainer": {"groups": groups}, "training": {"promptsPerStep": 4 * gpus}}
        jobs.apply(make_job(name, podTemplate=template, scheduling=scheduling, **spec))

    with fake_nodes(kubectl, "racks", range(200, 208), racks=4):
        apply("small", 4, "Required")
        jobs.wait_for("small", "Running", "True")
        assert len(set(racks("small"))) == 1
        apply("large", 8, "Required")
        assert "pod affinity rules" in jobs.wait_for("large", "Scheduled", "False", "Unschedulable")["message"]
        wait_until(lambda: len(racks("large")) == 2, "a rack is full", 60, interval=0.1)
        assert len(set(racks("large"))) == 1
        apply("wide", 8, "Preferred")
        jobs.wait_for("wide", "Running", "True")
        assert [racks("wide").count(rack) for rack in sorted(set(racks("wide")))] == [2, 2]


def test_two_jobs_that_hold_each_others_gpus_both_run(jobs: Jobs, kubectl: Any) -> None:
    """Each job needs two nodes whole. A taint keeps the first job from the second one until both hold half."""
    here = {"nodeSelector": {"only": "pair"}}
    free = {"tolerations": [{"key": "kept", "operator": "Exists"}]}
    spec = {
        "trainer": {"groups": [{"name": "a", "replicas": 2, "gpus": 8}]},
        "training": {"promptsPerStep": 16},
        # The second job must find its node while the first one holds its own, else it finds both free.
        "scheduling": {"timeoutSeconds": 10},
        "failurePolicy": {"backoffSeconds": 2, "maxRestarts": 0},
    }

    def running() -> list[str]:
        return [name for name in ("first", "second") if jobs.status(name).get("phase") == "Running"]

    with fake_nodes(kubectl, "pair", (100, 101), kept=[101]):
        for name, template in (("first", here), ("second", here | free)):
            jobs.apply(make_job(name, podTemplate=template, **spec))
            wait_until(lambda name=name: "placement" in jobs.status(name), f"{name} holds a node", 60, interval=0.1)
        kubectl("taint", "node", "kwok-101", "kept-")
        wait_until(running, "one of them runs", 180, interval=0.2)
        (winner,) = running()
        (other,) = {"first", "second"} - {winner}
        jobs.succeed(f"{winner}-a-0", f"{winner}-a-1")
        jobs.wait_for(other, "Running", "True")
        both = [jobs.status(winner), jobs.status(other)]
        assert both[0]["phase"] == "Succeeded"
        assert {one["lastFailure"]["reason"] for one in both if "lastFailure" in one} == {"PlacementTimeout"}
        assert [one["restarts"]["counted"] for one in both] == [0, 0]
        assert "1 of 2 pods had a node, and since" in jobs("events", "--types=Warning")
