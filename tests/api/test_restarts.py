"""Restarts, suspension and deadlines on a real API server, controller manager and scheduler."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, Operator, make_job

AT_ONCE = {"backoffSeconds": 0}


def test_a_failure_recreates_all_pods_with_the_next_contract(jobs: Jobs) -> None:
    jobs.run("again", failurePolicy=AT_ONCE)
    before = jobs.uids("again")
    jobs.fail("again-b-0")
    status = jobs.wait_for_attempt("again", 1)
    pods = {name: pod["metadata"] for name, pod in jobs.pods("again").items()}
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
        values = {"/status/conditions/-": theirs, "/status/throughput": 7}
        added = [{"op": "add", "path": path, "value": value} for path, value in values.items()]
        wait_until(lambda: jobs.get("grpo", "spent")["spec"]["training"].get("fancy"), "the new default", 60)
        jobs("patch", "grpo", "spent", "--subresource=status", "--type=json", "-p", json.dumps(added))
        jobs.fail("spent-a-0")
        status = jobs.wait_for_attempt("spent", 1)
        conditions = {c["type"]: c["message"] for c in status["conditions"]}
        assert conditions["Elastic"] == "of another release"
        assert conditions["Accepted"].endswith("ignores, spec.training.fancy")
        jobs.fail("spent-a-0")
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

    moments: list[Callable[[], bool]] = [
        lambda: True,
        lambda: jobs.status("killed")["phase"] == "Restarting",
        lambda: not all(jobs.replicas("killed").values()),
        lambda: not jobs.pods("killed"),
        lambda: False,
    ]
    for attempt, moment in enumerate(moments):

        def has_come(attempt: int = attempt, moment: Callable[[], bool] = moment) -> bool:
            return moment() or jobs.status("killed")["attempt"] > attempt

        jobs.fail("killed-a-0")
        wait_until(has_come, f"moment {attempt}", 60, interval=0.01)
        with operator.down():
            pass
        status = jobs.wait_for_attempt("killed", attempt + 1)
        assert status["restarts"] == {"total": attempt + 1, "counted": attempt + 1}
        assert len(jobs.list("configmap", "training.grpo.dev/job=killed")) == 1


def test_eviction_restarts_and_is_not_counted(jobs: Jobs) -> None:
    jobs.run("drained", failurePolicy=AT_ONCE)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    eviction |= {"metadata": {"name": "drained-b-0", "namespace": jobs.namespace}}
    path = f"/api/v1/namespaces/{jobs.namespace}/pods/drained-b-0/eviction"
    jobs("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    status = jobs.wait_for_attempt("drained", 1)
    assert status["restarts"] == {"total": 1, "counted": 0}
    assert (status["lastFailure"]["pod"], status["lastFailure"]["reason"]) == ("drained-b-0", "Evicted")


def test_suspending_gives_the_gpus_back_and_the_shape_may_change_before_resuming(jobs: Jobs) -> None:
    """Suspending works also while every pass fails, because the job's Service is no longer its own."""
    jobs.run("paused")
    disown = [{"op": "remove", "path": "/metadata/ownerReferences"}]
    jobs("patch", "service", "paused", "--type=json", "-p", json.dumps(disown))
    blocked = jobs.wait_for("paused", "Blocked", "True", "NameTaken")
    assert "applying Service paused failed" in blocked["message"]
    jobs.edit("paused", suspend=True)
    jobs.wait_for("paused", "Suspended", "True", "Suspended")
    jobs.wait_for("paused", "Blocked", "False", "Recovered")
    jobs("delete", "service", "paused")
    assert not jobs.list("pod", "training.grpo.dev/job=paused")
    assert jobs.status("paused")["phase"] == "Suspended"
    jobs.edit("paused", trainer={"groups": [{"name": "a", "replicas": 2, "gpus": 2}]}, suspend=False)
    status = jobs.wait_for_attempt("paused", 1)
    assert sorted(jobs.pods("paused")) == ["paused-a-0", "paused-a-1"]
    assert jobs.replicas("paused") == {"paused-a": 2}
    assert status["restarts"] == {"total": 0, "counted": 0}


def test_an_ended_job_is_deleted_after_its_time_to_live(jobs: Jobs) -> None:
    jobs.run("brief", ttlSecondsAfterFinished=1)
    jobs.succeed("brief-a-0", "brief-b-0")
    wait_until(lambda: not jobs.list("grpo", ""), "the job is gone", 60)
    wait_until(lambda: not jobs.list("statefulset,pod,configmap", "training.grpo.dev/job=brief"), "and all of it", 60)


def test_a_job_of_another_controller_is_left_alone(jobs: Jobs) -> None:
    jobs.apply(make_job("theirs", managedBy="kueue.x-k8s.io/multikueue"))
    jobs.run("ours", managedBy="training.grpo.dev/grpo-operator")
    assert jobs.status("theirs") == {"observedGeneration": 0}, "seen by nobody, and not taken for done"
