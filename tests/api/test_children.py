"""The children of a job on a real API server: who owns them, what changes them, how many requests a pass needs.

The nodes are fake: the tests write what kubelets would report.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane import audit
from support.control_plane.operators import USER, Jobs, Operator, make_job

Kubectl = Callable[..., str]


def test_groups_with_different_gpus_become_one_world(jobs: Jobs) -> None:
    jobs.run("world")
    containers = {name: pod["spec"]["containers"][0] for name, pod in jobs.pods("world").items()}
    limits = {name: container["resources"]["limits"]["nvidia.com/gpu"] for name, container in containers.items()}
    assert limits == {"world-a-0": "2", "world-b-0": "1"}
    contract = json.loads(jobs.get("configmap", "world-0")["data"]["contract.json"])
    members = [(member["pod"], member["rankOffset"], member["gpus"]) for member in contract["members"]]
    assert members == [("world-a-0", 0, 2), ("world-b-0", 2, 1)]
    assert contract["members"][0]["host"] == f"world-a-0.world.{jobs.namespace}.svc"
    assert {"Running", "2/2"} <= set(jobs("get", "grpo", "world").split())
    assert "MESSAGE" in jobs("get", "grpo", "-o", "wide").upper()
    assert "world" in jobs("get", "all")


def test_pods_find_nodes_that_fit_them_exactly(jobs: Jobs, kubectl: Kubectl) -> None:
    """Without an order, pods of 7 take nodes of 8."""
    room = {f"kwok-{index:03d}": 7 + index % 2 for index in range(8)}
    for node, count in room.items():
        more = {kind: {"example.com/exact": count} for kind in ("capacity", "allocatable")}
        kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps({"status": more}))
    groups = [{"name": "seven", "replicas": 4, "gpus": 7}, {"name": "eight", "replicas": 4, "gpus": 8}]
    jobs.run("exact", device={"resourceName": "example.com/exact"}, trainer={"groups": groups})
    for name, pod in jobs.pods("exact").items():
        wanted = int(pod["spec"]["containers"][0]["resources"]["limits"]["example.com/exact"])
        assert room[pod["spec"]["nodeName"]] == wanted, name


def test_a_job_deleted_while_the_operator_is_down_leaves_nothing(jobs: Jobs, operator: Operator) -> None:
    jobs.run("gone")
    assert not jobs.get("grpo", "gone")["metadata"].get("finalizers")
    with operator.down():
        jobs("delete", "grpo", "gone", "--timeout=60s")
        left = "statefulset,service,configmap,pod"
        # The garbage collector learns of a CRD, here one that may be seconds old, at most 30 s after it was created.
        wait_until(lambda: not jobs.list(left, "training.grpo.dev/job=gone"), "children collected", 120)


def test_a_job_recreated_at_once_under_its_name_gets_its_own_children(jobs: Jobs) -> None:
    jobs.run("again")
    old = jobs.get("grpo", "again")["metadata"]["uid"]
    jobs("delete", "grpo", "again", "--cascade=background")
    jobs.run("again")
    new = jobs.get("grpo", "again")["metadata"]["uid"]
    children = jobs.list("pod,statefulset", "training.grpo.dev/job=again")
    assert {one["metadata"]["labels"]["training.grpo.dev/job-uid"] for one in children} == {new}
    assert new != old


def test_passes_over_a_job_that_nothing_changes_cost_no_request(
    jobs: Jobs, operator: Operator, control_plane: ControlPlane
) -> None:
    # What the API server leaves out or writes in its own way.
    odd = {
        "env": [{"name": "EMPTY", "value": ""}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False}],
        "resources": {"requests": {"cpu": "1000m"}},
    }
    jobs.run("steady", podTemplate=odd)

    def requests() -> Counter[tuple[str, str]]:
        events = audit.requests(control_plane.audit_log, USER)
        return Counter(
            (e["verb"], e["objectRef"]["resource"])
            for e in events
            if e["objectRef"].get("namespace") == jobs.namespace and e["objectRef"]["resource"] != "events"
        )

    before, passes = requests(), operator.passes()
    for number in range(3):
        jobs("annotate", "grpo", "steady", f"wakes={number}", "--overwrite")
        wait_until(lambda enough=passes + number: operator.passes() > enough, "one more pass", 60, interval=0.2)
    assert requests() - before == Counter()


def test_a_child_deleted_or_changed_by_hand_is_restored_and_the_job_says_what_prevents_it(jobs: Jobs) -> None:
    jobs.run("restored")
    jobs("create", "quota", "none", "--hard=count/services=0")
    jobs("delete", "service", "restored")
    condition = jobs.wait_for("restored", "Blocked", "True", "QuotaExceeded")
    assert "Service restored does not fit the namespace's quota" in condition["message"]
    assert jobs.status("restored")["phase"] == "Running"
    jobs("delete", "quota", "none")
    jobs("scale", "statefulset", "restored-b", "--replicas=3")
    wait_until(lambda: jobs.replicas("restored")["restored-b"] == 1, "the scale is back", 60)
    wait_until(lambda: len(jobs.list("service", "training.grpo.dev/job=restored")) == 1, "the Service is back", 60)


def test_what_a_later_attempt_leaves_out_is_removed_although_the_children_were_created(jobs: Jobs) -> None:
    """An apply removes only what an apply set, so the operator first notes as applied what its creation set."""

    def template() -> dict[str, Any]:
        found: dict[str, Any] = jobs.get("statefulset", "shrinks-a")["spec"]["template"]
        return found

    jobs.run("shrinks", podTemplate={"env": [{"name": "OLD", "value": "1"}], "annotations": {"old": "1"}})
    jobs("annotate", "statefulset", "shrinks-a", "theirs=stays")
    for number in range(2):  # applied for the first time, and again
        jobs.edit("shrinks", suspend=True)
        jobs.wait_for("shrinks", "Suspended", "True")
        env = [{"name": f"NEW_{number}", "value": "1"}]
        spec = {"suspend": False, "podTemplate": {"env": env, "annotations": None}}
        jobs.edit("shrinks", **spec)
        jobs.wait_for("shrinks", "Running", "True")
        names = {one["name"] for one in template()["spec"]["containers"][0]["env"]}
        assert {name for name in names if name.startswith(("OLD", "NEW"))} == {f"NEW_{number}"}
        assert "old" not in template()["metadata"].get("annotations", {})
    whole = json.loads(jobs("get", "statefulset", "shrinks-a", "-o", "json", "--show-managed-fields"))
    assert whole["metadata"]["annotations"]["theirs"] == "stays"
    ours = [one["operation"] for one in whole["metadata"]["managedFields"] if one["manager"] == "grpo-operator"]
    assert ours.count("Apply") == 1


def test_a_foreign_object_is_not_adopted_and_the_job_starts_once_it_is_gone(jobs: Jobs) -> None:
    jobs("create", "service", "clusterip", "taken", "--tcp=80")
    jobs.apply(make_job("taken"))
    condition = jobs.wait_for("taken", "Accepted", "False", "NameTaken")
    assert "Service taken already exists and has no owner: it is not adopted" in condition["message"]
    assert not jobs.list("statefulset", "training.grpo.dev/job=taken")
    jobs("create", "quota", "none", "--hard=count/statefulsets.apps=0")
    jobs("delete", "service", "taken")
    condition = jobs.wait_for("taken", "Accepted", "False", "QuotaExceeded")
    assert "StatefulSet taken-a does not fit the namespace's quota" in condition["message"]
    jobs("delete", "quota", "none")
    jobs.wait_for("taken", "Running", "True")


def test_a_foreign_contract_is_not_adopted_and_no_pod_starts_until_it_is_gone(jobs: Jobs) -> None:
    """To create it shows whose the name is, when the attempt has begun."""
    jobs("create", "configmap", "held-0", "--from-literal=theirs=yes")
    jobs.apply(make_job("held"))
    condition = jobs.wait_for("held", "Blocked", "True", "NameTaken")
    assert "ConfigMap held-0 already exists and has no owner: it is not adopted" in condition["message"]
    assert not jobs.list("statefulset", "training.grpo.dev/job=held")
    assert jobs.get("configmap", "held-0")["data"] == {"theirs": "yes"}
    jobs("delete", "configmap", "held-0")
    jobs.wait_for("held", "Running", "True")
    jobs.wait_for("held", "Blocked", "False")


def test_pods_of_every_topology_pass_the_restricted_policy(jobs: Jobs, kubectl) -> None:
    kubectl("label", "namespace", jobs.namespace, "pod-security.kubernetes.io/enforce=restricted")
    roomy = {"trainer": {"groups": [{"name": "a", "gpus": 4}]}, "training": {"promptsPerStep": 8}}
    jobs.apply(make_job("colocate", **roomy))
    engines = {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}]}}
    jobs.apply(make_job("server", **roomy, generation=engines))
    jobs.apply(make_job("local", **roomy, generation={"topology": "NodeLocal", "nodeLocal": {"gpusPerNode": 1}}))
    for name in ("colocate", "server", "local"):
        jobs.wait_for(name, "Running", "True")
    pods = {pod["metadata"]["name"]: pod["spec"] for pod in jobs.list("pod")}
    assert set(pods) == {"colocate-a-0", "server-a-0", "server-gen-0", "local-a-0"}
    for pod in pods.values():
        assert pod["automountServiceAccountToken"] is False
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    with pytest.raises(RuntimeError, match='violates PodSecurity "restricted'):
        jobs("run", "loose", "--image=example.invalid/any")
