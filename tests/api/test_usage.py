"""The bill of a job on a real API server is what its pods held, by their own timestamps and the audit log."""

import json
from datetime import UTC, datetime, timedelta

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane import audit
from support.control_plane.operators import Jobs, Operator


def _pods(jobs: Jobs) -> dict[str, tuple[int, datetime]]:
    """Return the GPUs of each pod and the time since which it has them, by name."""
    found = {}
    for name, pod in jobs.pods("bill").items():
        placed = next(one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled")
        gpus = int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        found[name] = gpus, datetime.fromisoformat(placed["lastTransitionTime"])
    return found


def _move_back(jobs: Jobs) -> None:
    """Say that the pods were scheduled ten minutes earlier, and nothing was counted yet."""
    for name, (_, since) in _pods(jobs).items():
        earlier = (since - timedelta(minutes=10)).strftime("%Y-%m-%dT%H:%M:%SZ")
        jobs.report(name, conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": earlier}])
    nothing = json.dumps({"status": {"usage": None}})
    jobs("patch", "grpo", "bill", "--subresource=status", "--type=merge", "-p", nothing)


def _end(plane: ControlPlane, namespace: str, pod: str, until: datetime | None = None) -> datetime:
    """Return when a pod of this name was last deleted, before `until`: the request that removed it."""
    deleted = [
        datetime.fromisoformat(event["stageTimestamp"])
        for event in audit.events(plane.audit_log, pod)
        if event["verb"] == "delete" and event["responseStatus"]["code"] < 300
        if event["objectRef"] | {"resource": "pods", "namespace": namespace, "name": pod} == event["objectRef"]
    ]
    return max(time for time in deleted if until is None or time < until)


def test_the_bill_is_what_pods_held_through_a_failure_and_a_kill_of_the_operator(
    jobs: Jobs, operator: Operator, control_plane: ControlPlane
) -> None:
    jobs.run("bill", failurePolicy={"backoffSeconds": 0})
    with operator.down():
        _move_back(jobs)
        first = _pods(jobs)
        jobs.fail("bill-b-0")
    jobs.wait_for_attempt("bill", 1)
    second, again = _pods(jobs), datetime.now(UTC)
    jobs.succeed("bill-a-0", "bill-b-0")
    jobs.wait_for("bill", "Complete", "True")
    wait_until(lambda: not jobs.list("pod", "training.grpo.dev/job=bill"), "no pod is left", 40, interval=0.2)
    truth = 0.0
    for pods, until in ((first, again), (second, None)):
        for name, (gpus, since) in pods.items():
            truth += gpus * (_end(control_plane, jobs.namespace, name, until) - since).total_seconds()
    assert truth > 1800

    def bill() -> dict[str, int]:
        return dict(jobs.status("bill")["usage"]["gpuSeconds"])

    wait_until(lambda: abs(bill()["held"] - truth) <= 0.01 * truth, f"the bill is about {truth}", 15, interval=0.2)
    assert sum(seconds for use, seconds in bill().items() if use != "held") == bill()["held"]
