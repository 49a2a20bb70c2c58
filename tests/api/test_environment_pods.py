"""Environment pods beside a job's attempts, with the real StatefulSet controller, scheduler and admission."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.fake_nodes import fake_nodes
from support.control_plane.operators import Jobs, conditions, make_job, outcome

NODE = 340
BOXES = {"name": "boxes", "replicas": 2, "podTemplate": {"nodeSelector": {"only": "environments"}}}
SPEC: dict[str, Any] = {
    "environments": [{"name": "wordle", "factory": "m:Wordle"}],
    "environmentPods": {"groups": [BOXES]},
    "failurePolicy": {"backoffSeconds": 1},
}


def _uids(jobs: Jobs, role: str) -> dict[str, str]:
    selector = f"training.grpo.dev/job=acts,training.grpo.dev/role={role}"
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.list("pod", selector)}


def _wait_for_message(jobs: Jobs, kind: str, part: str) -> None:
    wait_until(lambda: part in jobs.condition("acts", kind).get("message", ""), part, 60, interval=0.2)


def _say_of(jobs: Jobs, pod: str, *, waiting: str | None) -> None:
    """Report, in place of the kubelet, that a pod is ready, or that its container waits."""
    container = {"name": "grpo", "ready": not waiting, "restartCount": 0, "image": "i", "imageID": "i"}
    container["state"] = {"waiting": {"reason": waiting, "message": "no such image"}} if waiting else {"running": {}}
    jobs.report(pod, containerStatuses=[container], conditions=conditions(not waiting))


def test_environment_pods_come_before_an_attempt_outlive_it_and_end_with_the_job(
    jobs: Jobs, kubectl: Any, grpo: Any
) -> None:
    jobs.kubectl("label", "namespace", jobs.namespace, "pod-security.kubernetes.io/enforce=restricted")
    jobs.apply(make_job("acts", **SPEC))
    waits = jobs.wait_for("acts", "Scheduled", "False", "WaitingForEnvironments")
    assert waits["message"].startswith("no GPU is asked for yet, as no environment pod of boxes is ready: ")
    _wait_for_message(jobs, "Scheduled", "acts-boxes-0: no node fits: ")
    assert jobs.replicas("acts") == {"acts-boxes": 2}
    shown = " ".join(grpo("status", "acts").output.split())
    for words in ("WaitingForEnvironments", "acts-boxes-0, acts-boxes-1", "boxes environment 0/2 2 x 0"):
        assert words in shown

    with fake_nodes(kubectl, "environments", [NODE], gpus=0):
        _runs_and_ends(jobs)


def _runs_and_ends(jobs: Jobs) -> None:
    jobs.wait_for("acts", "Running", "True")
    _wait_for_message(jobs, "Running", "all 2 pods are ready, and 2 of 2 environment pods")
    assert jobs.status("acts")["summary"]["environments"] == "2/2"
    assert {one["metadata"]["name"] for one in jobs.list("networkpolicy")} == {"acts", "acts.environments"}
    boxes = _uids(jobs, "environment")
    assert sorted(boxes) == ["acts-boxes-0", "acts-boxes-1"]

    _say_of(jobs, "acts-boxes-1", waiting="ErrImagePull")
    _wait_for_message(jobs, "Running", f"acts-boxes-1 on node kwok-{NODE}: ErrImagePull: no such image")
    status = jobs.status("acts")
    assert (status["phase"], status["attempt"], status["restarts"]["total"]) == ("Running", 0, 0)
    jobs.fail("acts-a-0")
    jobs.wait_for_attempt("acts", 1)
    assert _uids(jobs, "environment") == boxes, "an attempt that ends leaves them alone"
    assert jobs.status("acts")["lastFailure"]["pod"] == "acts-a-0"

    more = {"environmentPods": {"groups": [BOXES | {"replicas": 1}]}}
    with pytest.raises(RuntimeError, match=r"environmentPods.groups can change only while the job is suspended"):
        jobs.edit("acts", **more)
    jobs.edit("acts", suspend=True)
    jobs.wait_for("acts", "Suspended", "True")
    assert _uids(jobs, "environment") == {}
    jobs.edit("acts", **more, suspend=False)
    jobs.wait_for("acts", "Running", "True")
    assert sorted(_uids(jobs, "environment")) == ["acts-boxes-0"]
    jobs.succeed("acts-a-0", "acts-b-0", attempt=2)
    jobs.wait_for("acts", "Complete", "True")
    wait_until(lambda: not _uids(jobs, "environment"), "no environment pod is left", 60, interval=0.2)


def test_a_users_mistake_that_an_environment_pod_finds_ends_the_job(jobs: Jobs) -> None:
    jobs.apply(make_job("acts", **SPEC))
    _wait_for_message(jobs, "Scheduled", "acts-boxes-0: no node fits: ")
    said = "environments[wordle].factory: m cannot be imported"
    jobs.finish_pod("acts-boxes-0", 64, outcome(64, "ConfigError", said))
    assert said in jobs.wait_for("acts", "Failed", "True", "ConfigError")["message"]
    failure = jobs.status("acts")["lastFailure"]
    assert (failure["role"], failure["pod"], failure["message"]) == ("environment", "acts-boxes-0", said)
    wait_until(lambda: not _uids(jobs, "environment"), "no environment pod is left", 60, interval=0.2)
