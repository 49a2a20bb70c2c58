"""The operator's roles match the audit log: every right is used, none is missing, none reaches other namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane import audit
from support.control_plane.operators import (
    Jobs,
    Operator,
    Release,
    bind_claim,
    finish_download,
    install_chart,
    make_job,
    outcome,
    report_balance,
)

pytestmark = pytest.mark.api

FINALIZERS = ("training.grpo.dev", "grpojobs/finalizers", "update")
AHEAD = Path(__file__).parent / "programs" / "operator_ahead.py"
ELASTIC = {"replicas": 1, "minReplicas": 1, "maxReplicas": 2}
ENGINE = {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}], "elastic": ELASTIC}}


def _roles(kubectl: Any, release: Release, namespace: str | None) -> list[dict[str, Any]]:
    where = ["role", "-n", namespace] if namespace else ["clusterrole"]
    own = ["role", "-n", release.namespace, f"{release.name}-leader"]
    found = ([*where, f"{release.namespace}.{release.name}"], own)
    return [json.loads(kubectl("get", *each, "-o", "json")) for each in found]


def _drive(jobs: Jobs) -> None:
    """Take one job through what needs a right: claim, restarts, also in place, another shape, completion, deletion."""
    bind_claim(jobs, "runs")
    policy = {"backoffSeconds": 0, "onGenerationFailure": "RestartGeneration", "restartStrategy": "InPlace"}
    training = {"maxStaleness": 1}
    jobs.apply(
        make_job(
            "all",
            claim="runs",
            generation=ENGINE,
            failurePolicy=policy,
            training=training,
            scheduling={"gang": "Native"},
        )
    )
    jobs.wait_for("all", "Running", "True")
    report_balance(jobs, "all", engines=3)
    wait_until(lambda: "all-gen-1" in str(jobs.list("pod", "training.grpo.dev/job=all")), "a second engine", 30)
    jobs.finish_pod("all-gen-0", 70, outcome(70, "EngineDied", "killed"))
    wait_until(lambda: jobs.get("grpo", "all")["status"]["restarts"]["total"] == 1, "the engine's restart", 30)
    jobs.wait_for("all", "Running", "True")
    for pod in ("all-a-0", "all-b-0"):
        jobs.finish_pod(pod, 70, outcome(70, "RankFailed", "killed"))
    wait_until(lambda: jobs.get("grpo", "all")["status"].get("attempt") == 1, "the second attempt", 30)
    jobs.runs_again("all-a-0", "all-b-0")
    jobs.wait_for("all", "Running", "True")
    recreate = {"spec": {"failurePolicy": {"restartStrategy": "Recreate"}}}
    jobs("patch", "grpo", "all", "--type=merge", "-p", json.dumps(recreate))
    unready = {"status": {"conditions": [{"type": kind, "status": "False"} for kind in ("Ready", "ContainersReady")]}}
    jobs("patch", "pod", "all-b-0", "--subresource=status", "--type=strategic", "-p", json.dumps(unready))
    jobs.finish_pod("all-a-0", 70, outcome(70, "RankFailed", "killed", attempt=1))
    wait_until(lambda: jobs.get("grpo", "all")["status"].get("attempt") == 2, "the third attempt", 30)
    jobs("patch", "grpo", "all", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    jobs.wait_for("all", "Suspended", "True", "Suspended")
    shape = {"trainer": {"groups": [{"name": "a", "replicas": 1, "gpus": 2}]}, "suspend": False}
    jobs("patch", "grpo", "all", "--type=merge", "-p", json.dumps({"spec": shape}))
    jobs.wait_for("all", "Running", "True")
    jobs.finish_pod("all-a-0", 0, outcome(0))
    jobs.wait_for("all", "Complete", "True")
    jobs("patch", "grpo", "all", "--type=merge", "-p", '{"spec": {"ttlSecondsAfterFinished": 0}}')
    wait_until(lambda: not jobs.list("grpo"), "the job is deleted", 30)


def _download(jobs: Jobs) -> None:
    """Take a job through a download, whose pod ends as if it had worked, and one through the look at its template."""
    jobs.apply(make_job("fetched", cache={"claimName": "runs", "prefetch": True}))
    jobs.wait_for("fetched", "Scheduled", "False", "Downloading")
    assert jobs.list("statefulset", "training.grpo.dev/job=fetched") == []
    finish_download(jobs, "fetched")
    jobs.wait_for("fetched", "Running", "True")
    wait_until(lambda: not jobs.list("job", "training.grpo.dev/job=fetched"), "the Job is deleted", 30)
    jobs("delete", "grpo", "fetched")
    jobs.apply(make_job("claims", trainer={"groups": [{"name": "a", "gpus": 1, "resourceClaimTemplateName": "no"}]}))
    jobs.wait_for("claims", "Accepted", "False", "ClaimNotFound")
    jobs("delete", "grpo", "claims")


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


def _queue(jobs: Jobs, *, everywhere: bool) -> None:
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
    jobs("patch", "grpo", "queued", "--type=merge", "-p", '{"spec": {"suspend": true}}')
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


def _recreate_unseen(jobs: Jobs, plane: ControlPlane) -> None:
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


@contextmanager
def _running(
    plane: ControlPlane, release: Release, *more: str, program: tuple[str, ...] = ("-m", "grpo_operator")
) -> Iterator[None]:
    process = Operator(
        release.kubeconfig, plane.state / "logs" / f"{release.namespace}.log", [*release.arguments, *more], program
    )
    process.start()
    try:
        yield
    finally:
        process.kill()


def _loses_its_policy(jobs: Jobs) -> None:
    jobs.wait_for("kept", "Running", "True")
    wait_until(
        lambda: not jobs.list("networkpolicy", "training.grpo.dev/job=kept"), "the job has no policy any more", 30
    )
    assert jobs.list("service", "training.grpo.dev/job=kept")


def _begin(jobs: Jobs) -> None:
    jobs.apply(make_job("kept"))
    jobs.wait_for("kept", "Running", "True")
    _restores(jobs, "service", {"publishNotReadyAddresses": False})
    _restores(jobs, "networkpolicy", {"ingress": []})


def _restores(jobs: Jobs, kind: str, change: dict[str, Any]) -> None:
    """Change the job's only child of a kind by hand, and wait until it is as it was."""
    (child,) = jobs.list(kind, "training.grpo.dev/job=kept")
    name = child["metadata"]["name"]
    jobs("patch", kind, name, "--type=merge", "-p", json.dumps({"spec": change}))
    wait_until(lambda: jobs.get(kind, name)["spec"] == child["spec"], f"{kind} {name} is as it was", 30)


@pytest.mark.newer  # rights to PodGroups are used, too
def test_cluster_wide_every_right_is_used_and_none_is_missing(
    control_plane: ControlPlane, release: Release, operator: Operator, jobs: Jobs, kubectl: Any
) -> None:
    _drive(jobs)
    _download(jobs)
    kubectl("apply", "-f", "-", stdin=CLASSES)
    _queue(jobs, everywhere=True)
    _recreate_unseen(jobs, control_plane)
    _begin(jobs)
    with operator.down(), _running(control_plane, release, "--no-network-policies"):
        _loses_its_policy(jobs)
    log = control_plane.audit_log
    used = audit.used(log, release.user)
    # No request of the operator: the API server checks this right when a child with blockOwnerDeletion is created.
    used |= {FINALIZERS} if ("apps", "statefulsets", "create") in used else set()
    granted = audit.granted(_roles(kubectl, release, None))
    assert granted - used == set()
    assert used - granted == set()
    assert audit.denials(log, release.user) == []


def test_children_are_refused_without_the_right_to_finalizers(kubectl: Any, release: Release, jobs: Jobs) -> None:
    """This API server runs the same admission plugin as OpenShift."""
    jobs.apply(make_job("owner"))
    jobs.wait_for("owner", "Running", "True")
    child = jobs.list("configmap", "training.grpo.dev/job=owner")[0]
    assert child["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] is True
    child["metadata"] = {key: child["metadata"][key] for key in ("namespace", "ownerReferences")} | {"name": "child"}
    rules = [
        rule for rule in _roles(kubectl, release, None)[0]["rules"] if "grpojobs/finalizers" not in rule["resources"]
    ]
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "fewer", "namespace": jobs.namespace}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "fewer"}
    subject = {"kind": "User", "name": "fewer", "apiGroup": "rbac.authorization.k8s.io"}
    jobs("apply", "-f", "-", stdin=yaml.safe_dump(kind | {"kind": "Role", "rules": rules}))
    jobs(
        "apply",
        "-f",
        "-",
        stdin=yaml.safe_dump(kind | {"kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}),
    )
    create = ("create", "--dry-run=server", "-f", "-")
    with pytest.raises(RuntimeError, match="cannot set blockOwnerDeletion"):
        jobs(*create, "--as=fewer", stdin=yaml.safe_dump(child))
    jobs(*create, f"--as={release.user}", stdin=yaml.safe_dump(child))


@pytest.mark.newer  # rights to PodGroups are used, too
def test_two_namespaced_releases_side_by_side(
    control_plane: ControlPlane, operator: Operator, kubectl: Any, jobs: Jobs, other_namespace: str
) -> None:
    """Each release has rights only in its own namespace, none on nodes, and leaves the CRD to another release."""
    mine, theirs = jobs, Jobs(kubectl, other_namespace)
    values = ("crds.install=false", "watchNamespaces={%s}")
    first, second = (
        install_chart(
            control_plane, kubectl, values[0], values[1] % each.namespace, name="team", namespace=each.namespace
        )
        for each in (mine, theirs)
    )
    log = control_plane.audit_log
    with operator.down():
        theirs.apply(make_job("other"))
        with _running(control_plane, first), _running(control_plane, second):
            theirs.wait_for("other", "Running", "True")
            _drive(mine)
            _download(mine)
            _queue(mine, everywhere=False)
            _recreate_unseen(mine, control_plane)
            _begin(mine)
            for pod in ("other-a-0", "other-b-0"):
                theirs.finish_pod(pod, 0, outcome(0))
            theirs.wait_for("other", "Complete", "True")
        with _running(control_plane, first, "--no-network-policies", program=(str(AHEAD),)):
            _loses_its_policy(mine)
            _lose_a_pod(control_plane, first, mine)
    granted = audit.granted(_roles(kubectl, first, mine.namespace))
    assert ("", "nodes", "get") not in granted
    assert granted - audit.used(log, first.user) - {FINALIZERS} == set()
    for release in (first, second):
        assert audit.namespaces(log, release.user) == {release.namespace}
        assert audit.denials(log, release.user) == []


@pytest.mark.newer  # it has PodGroups
def test_without_the_right_to_an_optional_kind_only_jobs_that_ask_for_it_wait(
    control_plane: ControlPlane, operator: Operator, kubectl: Any, jobs: Jobs
) -> None:
    values = ("crds.install=false", f"watchNamespaces={{{jobs.namespace}}}")
    release = install_chart(control_plane, kubectl, *values, name="few", namespace=jobs.namespace)
    role = _roles(kubectl, release, jobs.namespace)[0]
    fewer = role | {"rules": [rule for rule in role["rules"] if "podgroups" not in rule["resources"]]}
    jobs("replace", "-f", "-", stdin=json.dumps(fewer | {"metadata": _named(role)}))
    with operator.down(), _running(control_plane, release):
        jobs.apply(make_job("gang", scheduling={"gang": "Native"}))
        jobs.run("plain")
        message = jobs.wait_for("gang", "Blocked", "True", "OperatorForbidden")["message"]
        assert message.startswith("reading the job's PodGroup failed, and is tried again: the operator's Service")
        jobs("replace", "-f", "-", stdin=json.dumps(role | {"metadata": _named(role)}))
        jobs.wait_for("gang", "Running", "True")
        jobs.wait_for("gang", "Blocked", "False", "Recovered")


def _named(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: raw["metadata"][key] for key in ("name", "namespace", "labels")}


def _lose_a_pod(plane: ControlPlane, release: Release, jobs: Jobs) -> None:
    """Delete a pod whose kubelet never confirms its end: by this operator's clock its grace period is long over."""
    jobs(
        "patch",
        "pod",
        "kept-b-0",
        "--type=merge",
        "-p",
        '{"metadata": {"finalizers": ["tests.example.com/silent-kubelet"]}}',
    )
    old = jobs.get("pod", "kept-b-0")["metadata"]["uid"]
    jobs("delete", "pod", "kept-b-0", "--wait=false", "--grace-period=1")
    wait_until(lambda: _forced(plane, release), "the pod is deleted by force", 30)
    jobs("patch", "pod", "kept-b-0", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    wait_until(lambda: jobs.get("grpo", "kept")["status"].get("attempt") == 1, "the second attempt", 40)
    jobs.wait_for("kept", "Running", "True")
    assert jobs.get("pod", "kept-b-0")["metadata"]["uid"] != old
    assert jobs.get("grpo", "kept")["status"]["lastFailure"]["pod"] == "kept-b-0"


def _forced(plane: ControlPlane, release: Release) -> bool:
    """Whether the operator has deleted the pod."""
    lines = plane.audit_log.read_text().splitlines()
    return any("/pods/kept-b-0" in line and '"verb":"delete"' in line and release.user in line for line in lines)
