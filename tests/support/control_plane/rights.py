"""Takes jobs through everything for which the operator needs a right, in place of kubelets, Kueue and people."""

import json
from typing import Any

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from grpo_operator.api import names
from support.control_plane.operators import (
    Jobs,
    Release,
    bind_claim,
    finish_download,
    make_job,
    outcome,
    report_balance,
)

ELASTIC = {"replicas": 1, "minReplicas": 1, "maxReplicas": 2}
ENGINE = {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}], "elastic": ELASTIC}}


def live_through(jobs: Jobs) -> None:
    """Take one job through what needs a right: claim, restarts, also in place, another shape, completion, deletion."""
    bind_claim(jobs, "runs")
    policy = {"backoffSeconds": 0, "onGenerationFailure": "RestartGeneration", "restartStrategy": "InPlace"}
    training = {"maxStaleness": 1}
    spec = {"generation": ENGINE, "failurePolicy": policy, "training": training, "scheduling": {"gang": "Native"}}
    jobs.apply(make_job("all", claim="runs", **spec))
    jobs.wait_for("all", "Running", "True")
    report_balance(jobs, "all", engines=3)
    wait_until(lambda: "all-gen-1" in str(jobs.list("pod", "training.grpo.dev/job=all")), "a second engine", 30)
    jobs.finish_pod("all-gen-0", 70, outcome(70, "EngineDied", "killed"))
    wait_until(lambda: jobs.status("all")["restarts"]["total"] == 1, "the engine's restart", 30)
    jobs.wait_for("all", "Running", "True")
    for pod in ("all-a-0", "all-b-0"):
        jobs.finish_pod(pod, 70, outcome(70, "RankFailed", "killed"))
    wait_until(lambda: jobs.status("all").get("attempt") == 1, "the second attempt", 30)
    jobs.runs_again("all-a-0", "all-b-0")
    jobs.wait_for("all", "Running", "True")
    recreate = {"spec": {"failurePolicy": {"restartStrategy": "Recreate"}}}
    jobs("patch", "grpo", "all", "--type=merge", "-p", json.dumps(recreate))
    jobs.runs_again("all-b-0", is_ready=False)
    jobs.finish_pod("all-a-0", 70, outcome(70, "RankFailed", "killed", attempt=1))
    wait_until(lambda: jobs.status("all").get("attempt") == 2, "the third attempt", 30)
    jobs.edit("all", suspend=True)
    jobs.wait_for("all", "Suspended", "True", "Suspended")
    shape = {"trainer": {"groups": [{"name": "a", "replicas": 1, "gpus": 2}]}, "suspend": False}
    jobs("patch", "grpo", "all", "--type=merge", "-p", json.dumps({"spec": shape}))
    jobs.wait_for("all", "Running", "True")
    jobs.succeed("all-a-0")
    jobs.wait_for("all", "Complete", "True")
    jobs("patch", "grpo", "all", "--type=merge", "-p", '{"spec": {"ttlSecondsAfterFinished": 0}}')
    wait_until(lambda: not jobs.list("grpo"), "the job is deleted", 30)


def download(jobs: Jobs) -> None:
    """Take a job through a download, whose pod is refused, then fails, and then ends as if it had worked; and another
    job through the look at its template.
    """
    jobs("create", "quota", "none", "--hard=pods=0")
    policy = {"backoffSeconds": 2, "maxRestarts": 0}
    jobs.apply(make_job("fetched", cache={"claimName": "runs", "prefetch": True}, failurePolicy=policy))
    refused = jobs.wait_for("fetched", "Scheduled", "False", "QuotaExceeded")["message"]
    assert "the cluster refuses the pod that downloads, and is asked again" in refused
    assert "exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0" in refused
    jobs("delete", "quota", "none")
    jobs.wait_for("fetched", "Scheduled", "False", "Downloading")
    assert jobs.list("statefulset", "training.grpo.dev/job=fetched") == []
    (first,) = jobs.list("job", "training.grpo.dev/job=fetched")
    finish_download(jobs, "fetched", "Failed")
    wait_until(lambda: "tried again at" in jobs.condition("fetched", "Scheduled")["message"], "it says when", 30)

    def downloads_again() -> bool:
        pods = jobs.list("pod", "training.grpo.dev/job=fetched,training.grpo.dev/role=download")
        now = [pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods]
        return len(now) == 1 and now != [first["metadata"]["uid"]]

    wait_until(downloads_again, "it is tried again", 30)
    finish_download(jobs, "fetched")
    jobs.wait_for("fetched", "Running", "True")
    wait_until(lambda: not jobs.list("job", "training.grpo.dev/job=fetched"), "the Job is deleted", 30)
    jobs("delete", "grpo", "fetched")
    jobs.apply(make_job("claims", trainer={"groups": [{"name": "a", "gpus": 1, "resourceClaimTemplateName": "no"}]}))
    jobs.wait_for("claims", "Accepted", "False", "ClaimNotFound")
    jobs("delete", "grpo", "claims")


def judge(jobs: Jobs, *kinds: str) -> None:
    """Let the operator say of what a site sets that it is valid."""
    for kind in kinds:
        jobs.apply({"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": names.DEFAULTS_NAME}})
        jobs("wait", f"{kind}/{names.DEFAULTS_NAME}", "--for=condition=Valid", "--timeout=30s")
        jobs("delete", kind, names.DEFAULTS_NAME)


CLASSES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: rbac}
spec: {nodeLabels: {kubernetes.io/os: linux}, tolerations: [{key: rbac, operator: Exists}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: rbac}
value: 7
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: rbac}
value: 8
"""


def queue(jobs: Jobs, *, everywhere: bool) -> None:
    """Take a job through a queue, in place of Kueue: admitted, evicted, admitted again, suspended.

    `everywhere`: with a flavor and priorities, which the operator reads where it may read objects of the cluster.
    """
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    for name, more, spec in (
        ("queued", {"kueue.x-k8s.io/priority-class": "rbac"}, {}),
        ("pending", {}, {"podTemplate": {"priorityClassName": "rbac"}}),
    ):
        made = make_job(name, **(spec if everywhere else {}))
        made["metadata"]["labels"] = labels | (more if everywhere else {})
        jobs.apply(made)
        jobs.wait_for(name, "Scheduled", "False", "Queued")
    if everywhere:
        assert [_workload(jobs, name)["spec"]["priority"] for name in ("queued", "pending")] == [7, 8]
    admitted = [("QuotaReserved", "True"), ("Admitted", "True"), ("Evicted", "False")]
    flavors = {"flavors": {"nvidia.com/gpu": "rbac"}} if everywhere else {}
    admission = {"clusterQueue": "cq", "podSetAssignments": [{"name": name, "count": 1, **flavors} for name in "ab"]}
    _answer(jobs, admitted, admission)
    jobs.wait_for("queued", "Running", "True")
    pod = jobs.get("pod", "queued-a-0")
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "a"
    assert ("kubernetes.io/os" in pod["spec"].get("nodeSelector", {})) is everywhere
    assert ("rbac" in [one.get("key") for one in pod["spec"]["tolerations"]]) is everywhere
    wait_until(lambda: _states(jobs)["PodsReady"] == "True", "Kueue is told that pods are ready", 30)
    _answer(jobs, [*admitted[:2], ("Evicted", "True")], admission)
    jobs.wait_for("queued", "Suspended", "True", "Queued")
    wait_until(lambda: "admission" not in _workload(jobs, "queued")["status"], "the quota is given back", 30)
    said = {"QuotaReserved": "False", "Admitted": "False", "Evicted": "True", "Requeued": "True", "PodsReady": "False"}
    assert _states(jobs) == said
    _answer(jobs, admitted, admission)
    jobs.wait_for("queued", "Running", "True")
    jobs.edit("queued", suspend=True)
    found = ("workloads.kueue.x-k8s.io", "training.grpo.dev/job=queued")
    wait_until(lambda: not jobs.list(*found), "a suspended job has no Workload", 30)
    jobs("delete", "grpo", "queued", "pending")


def _workload(jobs: Jobs, name: str) -> dict[str, Any]:
    (found,) = jobs.list("workloads.kueue.x-k8s.io", f"training.grpo.dev/job={name}")
    return found


def _states(jobs: Jobs) -> dict[str, str]:
    return {one["type"]: one["status"] for one in _workload(jobs, "queued")["status"]["conditions"]}


def _answer(jobs: Jobs, states: list[tuple[str, str]], admission: dict[str, Any]) -> None:
    """Write what Kueue would."""
    at = "2026-01-01T00:00:00Z"
    conditions = [
        {"type": kind, "status": value, "reason": "Preempted", "message": "said", "lastTransitionTime": at}
        for kind, value in states
    ]
    found = _workload(jobs, "queued")
    others = [one for one in found.get("status", {}).get("conditions", []) if one["type"] not in dict(states)]
    patch = json.dumps({"status": {"admission": admission, "conditions": [*others, *conditions]}})
    name = found["metadata"]["name"]
    jobs("patch", "workloads.kueue.x-k8s.io", name, "--subresource=status", "--type=merge", "-p", patch)


def recreate_unseen(jobs: Jobs, plane: ControlPlane) -> None:
    """Create a job again under its name while nobody collects what the first one left: its successor's operator does.

    Garbage collection misses it if the API server restarts meanwhile.
    """
    jobs.run("twice")
    earlier = f"training.grpo.dev/job-uid={jobs.get('grpo', 'twice')['metadata']['uid']}"
    manager = next(daemon for daemon in plane.daemons() if daemon.name == "kube-controller-manager")
    manager.stop(grace=0)
    try:
        jobs("delete", "grpo", "twice")
        jobs.apply(make_job("twice"))
        kinds = "service,networkpolicy,configmap,statefulset,pod"
        wait_until(lambda: not jobs.list(kinds, earlier), "nothing is left of the first job", 30)
    finally:
        manager.start()
    jobs.wait_for("twice", "Running", "True")


def lose_its_policy(jobs: Jobs) -> None:
    jobs.wait_for("kept", "Running", "True")
    mine = ("networkpolicy", "training.grpo.dev/job=kept")
    wait_until(lambda: not jobs.list(*mine), "the job has no policy any more", 30)
    assert jobs.list("service", "training.grpo.dev/job=kept")


def begin(jobs: Jobs) -> None:
    jobs.run("kept")
    _restores(jobs, "service", {"publishNotReadyAddresses": False})
    _restores(jobs, "networkpolicy", {"ingress": []})


def _restores(jobs: Jobs, kind: str, change: dict[str, Any]) -> None:
    """Change the job's only child of a kind by hand, and wait until it is as it was."""
    (child,) = jobs.list(kind, "training.grpo.dev/job=kept")
    name = child["metadata"]["name"]
    jobs("patch", kind, name, "--type=merge", "-p", json.dumps({"spec": change}))
    wait_until(lambda: jobs.get(kind, name)["spec"] == child["spec"], f"{kind} {name} is as it was", 30)


def lose_a_pod(plane: ControlPlane, release: Release, jobs: Jobs) -> None:
    """Let a pod seem to be of another attempt, so that the operator itself deletes it."""
    old = jobs.get("pod", "kept-b-0")["metadata"]["uid"]
    jobs("label", "pod", "kept-b-0", f"{names.LABEL_ATTEMPT}=7", "--overwrite")
    wait_until(lambda: _deleted(plane, release), "the operator deletes the pod", 30)
    jobs.wait_for_attempt("kept", 1)
    assert jobs.get("pod", "kept-b-0")["metadata"]["uid"] != old
    assert jobs.status("kept")["lastFailure"]["pod"] == "kept-b-0"


def _deleted(plane: ControlPlane, release: Release) -> bool:
    """Whether the operator has deleted the pod."""
    lines = plane.audit_log.read_text().splitlines()
    return any("/pods/kept-b-0" in line and '"verb":"delete"' in line and release.user in line for line in lines)
