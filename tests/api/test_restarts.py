"""Restarts, suspension and deadlines on a real API server, controller manager and scheduler."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, Operator, make_job, outcome

AT_ONCE = {"backoffSeconds": 0}
SERVER = {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 2, "gpus": 1}]}}


def _status(jobs: Jobs, name: str) -> dict[str, Any]:
    status: dict[str, Any] = jobs.get("grpo", name).get("status", {})
    return status


def _fail(jobs: Jobs, pod: str, message: str = "rank 2: RuntimeError: no luck") -> None:
    jobs.finish_pod(pod, 70, outcome(70, "RankFailed", message))


def _wait(
    jobs: Jobs, name: str, holds: Callable[[dict[str, Any]], bool], what: str, timeout: float = 80
) -> dict[str, Any]:
    try:
        wait_until(lambda: holds(_status(jobs, name)), f"{what} of {name}", timeout, interval=0.2)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; status: {json.dumps(_status(jobs, name), indent=1)}") from None
    return _status(jobs, name)


def _runs_again(attempt: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status.get("attempt") == attempt and status["phase"] == "Running"


def test_a_failure_recreates_all_pods_with_the_next_contract(jobs: Jobs) -> None:
    jobs.run("again", failurePolicy=AT_ONCE)
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in jobs.list("pod", "training.grpo.dev/job=again")}
    _fail(jobs, "again-b-0")
    status = _wait(jobs, "again", _runs_again(1), "the second attempt")
    pods = {p["metadata"]["name"]: p["metadata"] for p in jobs.list("pod", "training.grpo.dev/job=again")}
    assert pods.keys() == before.keys()
    assert all(pods[name]["uid"] != uid for name, uid in before.items())
    assert {meta["labels"]["training.grpo.dev/attempt"] for meta in pods.values()} == {"1"}
    assert [c["metadata"]["name"] for c in jobs.list("configmap", "training.grpo.dev/job=again")] == ["again-1"]
    assert json.loads(jobs.get("configmap", "again-1")["data"]["contract.json"])["attempt"] == 1
    assert status["restarts"] == {"total": 1, "counted": 1}
    assert {m["uid"] for m in status["members"]} == {meta["uid"] for meta in pods.values()}
    assert (status["lastFailure"]["pod"], status["lastFailure"]["attempt"]) == ("again-b-0", 0)
    events = jobs("events", "--for", "grpojob/again")
    assert "no luck; restart 1 of 3" in events
    assert "1" in jobs("get", "grpo", "again", "-o", "jsonpath={.status.restarts.total}")


def test_the_job_fails_once_its_restarts_are_used_up(jobs: Jobs, kubectl: Any) -> None:
    """Both failures are acted on although the CRD became newer than the operator while the job ran."""
    jobs.run("spent", failurePolicy=AT_ONCE | {"maxRestarts": 1})
    with _newer_crd(kubectl):
        theirs = {"type": "Elastic", "status": "True", "reason": "Theirs", "message": "of another release"}
        theirs |= {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        added = [
            {"op": "add", "path": "/status/conditions/-", "value": theirs},
            {"op": "add", "path": "/status/throughput", "value": 7},
        ]
        wait_until(lambda: jobs.get("grpo", "spent")["spec"]["training"].get("fancy"), "the new default", 30)
        jobs("patch", "grpo", "spent", "--subresource=status", "--type=json", "-p", json.dumps(added))
        _fail(jobs, "spent-a-0")
        status = _wait(jobs, "spent", _runs_again(1), "the second attempt")
        conditions = {c["type"]: c["message"] for c in status["conditions"]}
        assert conditions["Elastic"] == "of another release"
        assert conditions["Accepted"].endswith("ignores, spec.training.fancy")
        _fail(jobs, "spent-a-0")
        condition = jobs.wait_for("spent", "Failed", "True", "RankFailed")
    assert "the restart of failurePolicy.maxRestarts is used up" in condition["message"]
    wait_until(lambda: not jobs.list("pod", "training.grpo.dev/job=spent"), "no pod is left", 40)


@contextmanager
def _newer_crd(kubectl: Any) -> Iterator[None]:
    """The CRD with one more field that has a default, and one more field of the status."""
    root = "/spec/versions/0/schema/openAPIV3Schema/properties"
    training, status = f"{root}/spec/properties/training/properties", f"{root}/status/properties"
    fields = {f"{training}/fancy": {"type": "boolean", "default": True}, f"{status}/throughput": {"type": "integer"}}

    def patch(*changes: dict[str, Any]) -> None:
        kubectl("patch", "crd", "grpojobs.training.grpo.dev", "--type=json", "-p", json.dumps(changes))

    patch(*({"op": "add", "path": path, "value": field} for path, field in fields.items()))
    try:
        yield
    finally:
        patch(*({"op": "remove", "path": path} for path in fields))


def test_an_operator_killed_at_any_moment_of_a_restart_continues_it(jobs: Jobs, operator: Operator) -> None:
    """Killed before the failure is seen, after `Restarting`, at the first scale to 0, with no pod, in attempt N + 1."""
    jobs.run("killed", failurePolicy=AT_ONCE | {"maxRestarts": 9})

    def pods() -> int:
        return len(jobs.list("pod", "training.grpo.dev/job=killed"))

    moments: list[Callable[[int], bool]] = [
        lambda _: True,
        lambda attempt: (
            _status(jobs, "killed")["phase"] == "Restarting" or _status(jobs, "killed")["attempt"] > attempt
        ),
        lambda attempt: (
            any(not s["spec"]["replicas"] for s in jobs.list("statefulset"))
            or _status(jobs, "killed")["attempt"] > attempt
        ),
        lambda attempt: pods() == 0 or _status(jobs, "killed")["attempt"] > attempt,
        lambda attempt: _status(jobs, "killed")["attempt"] > attempt,
    ]
    for attempt, moment in enumerate(moments):
        _fail(jobs, "killed-a-0")
        wait_until(partial(moment, attempt), f"moment {attempt}", 30, interval=0.01)
        with operator.down():
            pass
        status = _wait(jobs, "killed", _runs_again(attempt + 1), f"attempt {attempt + 1}")
        assert status["restarts"] == {"total": attempt + 1, "counted": attempt + 1}
        assert len(jobs.list("configmap", "training.grpo.dev/job=killed")) == 1


def test_eviction_restarts_and_is_not_counted(jobs: Jobs) -> None:
    jobs.run("drained", failurePolicy=AT_ONCE)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "drained-b-0", "namespace": jobs.namespace},
    }
    jobs(
        "create",
        "--raw",
        f"/api/v1/namespaces/{jobs.namespace}/pods/drained-b-0/eviction",
        "-f",
        "-",
        stdin=json.dumps(eviction),
    )
    status = _wait(jobs, "drained", _runs_again(1), "the second attempt")
    assert status["restarts"] == {"total": 1, "counted": 0}
    assert (status["lastFailure"]["pod"], status["lastFailure"]["reason"]) == ("drained-b-0", "Evicted")


def test_a_failed_engine_is_recreated_and_the_trainer_is_not(jobs: Jobs) -> None:
    jobs.run("engines", generation=SERVER, failurePolicy={"onGenerationFailure": "RestartGeneration"})

    def pods() -> dict[str, str]:
        """UIDs by name; for a moment the engine's pod is gone."""
        return {p["metadata"]["name"]: p["metadata"]["uid"] for p in jobs.list("pod", "training.grpo.dev/job=engines")}

    uids = pods()
    assert json.loads(jobs.get("configmap", "engines-0")["data"]["contract.json"])["restartEngines"] is True
    jobs.finish_pod("engines-gen-1", 70, outcome(70, "EngineDied", "engine engines-gen-1 was killed"))
    status = _wait(
        jobs, "engines", lambda s: {g["name"]: g["incarnation"] for g in s["groups"]}["gen"] == 1, "another incarnation"
    )
    wait_until(lambda: pods().get("engines-gen-1") not in (None, uids["engines-gen-1"]), "another pod", 30)
    status = _wait(jobs, "engines", lambda s: s["phase"] == "Running", "running again")
    assert status["attempt"] == 0
    now = pods()
    assert {name for name in now if now[name] != uids[name]} == {"engines-gen-1"}
    assert {m["pod"]: m["uid"] for m in status["members"]} == now


def test_suspending_gives_the_gpus_back_and_the_shape_may_change_before_resuming(jobs: Jobs) -> None:
    """Suspending works also while every pass fails, because the job's Service is no longer its own."""
    jobs.run("paused")
    disown = [{"op": "remove", "path": "/metadata/ownerReferences"}]
    jobs("patch", "service", "paused", "--type=json", "-p", json.dumps(disown))
    blocked = jobs.wait_for("paused", "Blocked", "True", "NameTaken")
    assert "applying Service paused failed" in blocked["message"]
    jobs("patch", "grpo", "paused", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    jobs.wait_for("paused", "Suspended", "True", "Suspended")
    jobs.wait_for("paused", "Blocked", "False", "Recovered")
    jobs("delete", "service", "paused")
    assert not jobs.list("pod", "training.grpo.dev/job=paused")
    assert _status(jobs, "paused")["phase"] == "Suspended"
    shape = {"trainer": {"groups": [{"name": "a", "replicas": 2, "gpus": 2}]}, "suspend": False}
    jobs("patch", "grpo", "paused", "--type=merge", "-p", json.dumps({"spec": shape}))
    status = _wait(jobs, "paused", _runs_again(1), "the resumed attempt")
    assert {p["metadata"]["name"] for p in jobs.list("pod", "training.grpo.dev/job=paused")} == {
        "paused-a-0",
        "paused-a-1",
    }
    assert {s["metadata"]["name"] for s in jobs.list("statefulset", "training.grpo.dev/job=paused")} == {"paused-a"}
    assert status["restarts"] == {"total": 0, "counted": 0}


def test_an_ended_job_is_deleted_after_its_time_to_live(jobs: Jobs) -> None:
    jobs.run("brief", ttlSecondsAfterFinished=1)
    for pod in ("brief-a-0", "brief-b-0"):
        jobs.finish_pod(pod, 0, outcome(0))
    wait_until(lambda: not jobs.list("grpo", ""), "the job is gone", 20)
    wait_until(lambda: not jobs.list("statefulset,pod,configmap", "training.grpo.dev/job=brief"), "and all of it", 30)


def test_a_job_of_another_controller_is_left_alone(jobs: Jobs) -> None:
    jobs.apply(make_job("theirs", managedBy="kueue.x-k8s.io/multikueue"))
    jobs.run("ours", managedBy="training.grpo.dev/grpo-operator")
    assert jobs.get("grpo", "theirs")["status"] == {"observedGeneration": 0}, "seen by nobody, and not taken for done"


def test_pods_of_a_lost_node_are_recreated_on_other_nodes(jobs: Jobs, kubectl: Any) -> None:
    """nodeLostSeconds counts from the time when the cluster marks the node not ready."""
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "dying", "labels": {"kubernetes.io/hostname": "dying", "tier": "dying"}},
    }
    capacity = {"cpu": "64", "memory": "256Gi", "pods": "100", "nvidia.com/gpu": "8"}
    kubectl("apply", "-f", "-", stdin=json.dumps(node))
    ready = {"status": {"capacity": capacity, "allocatable": capacity, "conditions": [_ready("True")]}}
    kubectl("patch", "node", "dying", "--subresource=status", "--type=merge", "-p", json.dumps(ready))
    prefers = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_prefers("dying")]}}
    try:
        jobs.apply(make_job("moved", failurePolicy=AT_ONCE | {"nodeLostSeconds": 1}, podTemplate={"affinity": prefers}))
        wait_until(lambda: len(jobs.list("pod", "training.grpo.dev/job=moved")) == 2, "the pods exist", 30)
        wait_until(
            lambda: jobs.get("pod", "moved-b-0")["spec"].get("nodeName") == "dying", "the pod is on the node", 30
        )
        for name in ("moved-a-0", "moved-b-0"):
            started = {"status": {"phase": "Running", "podIP": "10.9.9.9", "conditions": [_ready("True")]}}
            jobs("patch", "pod", name, "--subresource=status", "--type=strategic", "-p", json.dumps(started))
        jobs.wait_for("moved", "Running", "True")
        broken = {"status": {"conditions": [_ready("False")]}}
        kubectl("patch", "node", "dying", "--subresource=status", "--type=merge", "-p", json.dumps(broken))
        lost = {"status": {"conditions": [_ready("False")]}}
        jobs("patch", "pod", "moved-b-0", "--subresource=status", "--type=strategic", "-p", json.dumps(lost))
        status = _wait(jobs, "moved", _runs_again(1), "the second attempt", timeout=120)
        assert status["lastFailure"]["reason"] == "NodeLost"
        assert status["restarts"] == {"total": 1, "counted": 0}
        assert [n["name"] for n in status["avoidNodes"]] == ["dying"]
    finally:
        kubectl("delete", "node", "dying")


def _ready(status: str) -> dict[str, str]:
    now = "2026-01-01T00:00:00Z"
    return {
        "type": "Ready",
        "status": status,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
        "reason": "Test",
        "message": "",
    }


def _prefers(tier: str) -> dict[str, Any]:
    return {"weight": 100, "preference": {"matchExpressions": [{"key": "tier", "operator": "In", "values": [tier]}]}}
