"""The operator's roles match the audit log: every right is used, none is missing, none reaches other namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from grpo_devcluster.controlplane import ControlPlane
from grpo_operator.api import names
from support.control_plane import audit, rights
from support.control_plane.operators import Jobs, Operator, Release, install_chart, make_job

FINALIZERS = ("training.grpo.dev", "grpojobs/finalizers", "update")


def _roles(kubectl: Any, release: Release, namespace: str | None) -> list[dict[str, Any]]:
    where = ["role", "-n", namespace] if namespace else ["clusterrole"]
    own = ["role", "-n", release.namespace, f"{release.name}-leader"]
    found = ([*where, f"{release.namespace}.{release.name}"], own)
    return [json.loads(kubectl("get", *each, "-o", "json")) for each in found]


@contextmanager
def _running(plane: ControlPlane, release: Release, *more: str) -> Iterator[None]:
    log = plane.state / "logs" / f"{release.namespace}.log"
    process = Operator(release.kubeconfig, log, [*release.arguments, *more])
    process.start()
    try:
        yield
    finally:
        process.kill()


@pytest.mark.newer  # rights to PodGroups are used, too
def test_cluster_wide_every_right_is_used_and_none_is_missing(
    control_plane: ControlPlane, release: Release, operator: Operator, jobs: Jobs, kubectl: Any
) -> None:
    rights.live_through(jobs)
    rights.download(jobs)
    kubectl("apply", "-f", "-", stdin=rights.CLASSES)
    rights.queue(jobs, everywhere=True)
    rights.recreate_unseen(jobs, control_plane)
    rights.judge(jobs, *names.DEFAULTS_KINDS)
    rights.begin(jobs)
    with operator.down(), _running(control_plane, release, "--no-network-policies"):
        rights.lose_its_policy(jobs)
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
    jobs.run("owner")
    child = jobs.list("configmap", "training.grpo.dev/job=owner")[0]
    assert child["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] is True
    child["metadata"] = {key: child["metadata"][key] for key in ("namespace", "ownerReferences")} | {"name": "child"}
    all_rules = _roles(kubectl, release, None)[0]["rules"]
    rules = [rule for rule in all_rules if "grpojobs/finalizers" not in rule["resources"]]
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "fewer", "namespace": jobs.namespace}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "fewer"}
    subject = {"kind": "User", "name": "fewer", "apiGroup": "rbac.authorization.k8s.io"}
    jobs.apply(kind | {"kind": "Role", "rules": rules})
    jobs.apply(kind | {"kind": "RoleBinding", "roleRef": reference, "subjects": [subject]})
    create = ("create", "--dry-run=server", "-f", "-")
    with pytest.raises(RuntimeError, match="cannot set blockOwnerDeletion"):
        jobs(*create, "--as=fewer", stdin=yaml.safe_dump(child))
    jobs(*create, f"--as={release.user}", stdin=yaml.safe_dump(child))


@pytest.mark.newer  # rights to PodGroups are used, too
@pytest.mark.parametrize("uses_all", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_namespaced_releases_side_by_side(
    control_plane: ControlPlane, operator: Operator, kubectl: Any, jobs: Jobs, other_namespace: str, uses_all: bool
) -> None:
    """Each release has rights only in its own namespace, none on nodes, and leaves the CRD to another release.

    Without `uses_all`: its rights are those of a cluster-wide one but for objects of the cluster
    (tests/unit/operator/chart/test_objects.py), of which the test above uses every one.
    """
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
            if uses_all:
                rights.live_through(mine)
                rights.download(mine)
                rights.queue(mine, everywhere=False)
                rights.recreate_unseen(mine, control_plane)
                rights.judge(mine, "GRPODefaults")
            rights.begin(mine)
            theirs.succeed("other-a-0", "other-b-0")
            theirs.wait_for("other", "Complete", "True")
        with _running(control_plane, first, "--no-network-policies"):
            rights.lose_its_policy(mine)
            rights.lose_a_pod(control_plane, first, mine)
    granted = audit.granted(_roles(kubectl, first, mine.namespace))
    assert ("", "nodes", "get") not in granted
    assert not uses_all or granted - audit.used(log, first.user) - {FINALIZERS} == set()
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
