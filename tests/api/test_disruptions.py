"""Pods that the cluster takes away: the status names the cause, and says whether the restart counts.

The API server, the controller manager and the scheduler are real.
"""

import json
from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, make_job

pytestmark = pytest.mark.api

WAITS = {"backoffSeconds": 3600, "maxBackoffSeconds": 3600}
LOW = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 83456Ki."


def _run(jobs: Jobs, name: str, **spec: Any) -> None:
    jobs.apply(make_job(name, failurePolicy=WAITS, **spec))
    jobs.wait_for(name, "Running", "True")


def _failure(jobs: Jobs, name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the failure that the job restarts after, its restarts, and the message of `kubectl get -o wide`."""
    jobs.wait_for(name, "Restarting", "True")
    status = jobs.get("grpo", name)["status"]
    return status["lastFailure"], status["restarts"], status["summary"]["message"]


def test_a_pod_evicted_by_its_kubelet_is_named_although_it_is_gone_within_milliseconds(jobs: Jobs) -> None:
    """The StatefulSet controller deletes a pod in phase Failed at once, and the API server grants no grace period."""
    _run(jobs, "squeezed")
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": LOW}
    evicted = {"status": {"phase": "Failed", "reason": "Evicted", "message": LOW, "conditions": [target]}}
    jobs("patch", "pod", "squeezed-b-0", "--subresource=status", "--type=strategic", "-p", json.dumps(evicted))
    failure, restarts, message = _failure(jobs, "squeezed")
    assert (failure["reason"], failure["pod"], failure["counted"]) == ("Evicted", "squeezed-b-0", False)
    assert restarts == {"total": 1, "counted": 0}
    assert LOW in message


def test_a_pod_that_its_kubelet_refuses_is_reported_with_the_kubelets_message(jobs: Jobs) -> None:
    _run(jobs, "refused")
    refused = {
        "status": {
            "phase": "Failed",
            "reason": "UnexpectedAdmissionError",
            "message": "Allocate failed: no healthy devices",
        }
    }
    jobs("patch", "pod", "refused-b-0", "--subresource=status", "--type=strategic", "-p", json.dumps(refused))
    failure, restarts, message = _failure(jobs, "refused")
    assert (failure["reason"], restarts["counted"]) == ("UnexpectedAdmissionError", 1)
    assert "no healthy devices" in message


def test_a_pod_preempted_by_the_scheduler_is_named_and_not_counted(jobs: Jobs, kubectl: Any) -> None:
    urgent = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(urgent))
    kubectl("label", "node", "kwok-000", "only=preempted", "--overwrite")
    here = {"nodeSelector": {"only": "preempted"}}
    try:
        groups = [{"name": "a", "gpus": 1}]
        _run(
            jobs, "preempted", trainer={"groups": groups}, podTemplate=here | {"resources": {"requests": {"cpu": "60"}}}
        )
        container = {"name": "c", "image": "i", "resources": {"requests": {"cpu": "60"}}}
        spec = here | {"priorityClassName": "urgent", "containers": [container]}
        jobs(
            "apply",
            "-f",
            "-",
            stdin=json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": spec}),
        )
        failure, restarts, message = _failure(jobs, "preempted")
        assert (failure["reason"], failure["node"], restarts["counted"]) == ("Preempted", "kwok-000", 0)
        assert "higher priority" in message
        wait_until(lambda: jobs.get("pod", "urgent")["spec"].get("nodeName") == "kwok-000", "its place is taken", 30)
    finally:
        kubectl("label", "node", "kwok-000", "only-")
        jobs("delete", "pod", "urgent", "--ignore-not-found", "--wait=false")


def test_a_pod_that_somebody_deletes_by_force_is_named_and_counted(jobs: Jobs) -> None:
    _run(jobs, "deleted")
    jobs("delete", "pod", "deleted-b-0", "--force", "--grace-period=0")
    failure, restarts, _ = _failure(jobs, "deleted")
    assert (failure["reason"], failure["pod"], restarts["counted"]) == ("PodReplaced", "deleted-b-0", 1)
