"""A job's life on a real API server, controller manager and scheduler: refused, running, complete, failed, deleted.

The nodes are fake: the tests write what kubelets would report.
"""

import json

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, Operator, make_job, outcome


def _claim(mode: str) -> dict:
    spec = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": [mode]}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}, "spec": spec}


def test_complete_once_every_pod_is_done_and_scaled_to_zero(jobs: Jobs) -> None:
    jobs.run("done")
    progress = {"step": 5, "totalSteps": 5, "reward": 0.75, "checkpointStep": 5}
    progress |= {"checkpoint": "ns/done/uid/checkpoints/step-5"}
    jobs.succeed("done-b-0")
    assert jobs.replicas("done") == {"done-a": 1, "done-b": 1}
    jobs.finish_pod("done-a-0", 0, outcome(0, progress=progress))
    condition = jobs.wait_for("done", "Complete", "True", "TrainingDone")
    assert "checkpoint ns/done/uid/checkpoints/step-5" in condition["message"]
    wait_until(lambda: jobs.replicas("done") == {"done-a": 0, "done-b": 0}, "StatefulSets at 0", 60)
    status = jobs.status("done")
    assert status["phase"] == "Succeeded"
    assert status["summary"]["step"] == "5/5"
    assert status["progress"]["reward"] == 0.75
    assert {m["pod"]: m["outcome"]["exitCode"] for m in status["members"]} == {"done-a-0": 0, "done-b-0": 0}
    jobs("wait", "--for=condition=Complete", "grpo/done", "--timeout=1s")
    events = json.loads(jobs("get", "events.events.k8s.io", "-o", "json"))["items"]
    reasons = sorted(one["reason"] for one in events if one["regarding"]["kind"] == "GRPOJob")
    if "Scheduled" in reasons:  # only where its pods took seconds to become ready
        reasons.remove("Scheduled")
    assert reasons == ["Accepted", "Complete", "RestartsFromStepZero", "Running"], "each once"


def test_a_replaced_pod_is_seen_by_an_operator_that_was_down(jobs: Jobs, operator: Operator) -> None:
    jobs.run("away", failurePolicy={"maxRestarts": 0})
    uid = jobs.get("pod", "away-b-0")["metadata"]["uid"]
    with operator.down():
        jobs("delete", "pod", "away-b-0", "--force", "--grace-period=0")
        wait_until(lambda: jobs.uids("away").get("away-b-0") not in (None, uid), "another pod", 60)
    jobs.wait_for("away", "Failed", "True", "PodReplaced")


def test_a_claim_must_exist_and_be_shared_before_the_job_is_accepted(jobs: Jobs) -> None:
    engine = {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}]}}
    jobs.apply(make_job("stored", claim="runs", trainer={"groups": [{"name": "a", "gpus": 1}]}, generation=engine))
    condition = jobs.wait_for("stored", "Accepted", "False", "ClaimNotFound")
    assert "spec.storage.claimName" in condition["message"]
    assert jobs.status("stored")["phase"] == "Invalid"
    jobs.apply(_claim("ReadWriteOnce"))
    condition = jobs.wait_for("stored", "Accepted", "False", "ClaimNotReadWriteMany")
    assert "each of 2 pods writes to it; use a claim with ReadWriteMany" in condition["message"]
    assert not jobs.list("statefulset", "training.grpo.dev/job=stored")
    jobs("delete", "pvc", "runs")
    jobs.apply(_claim("ReadWriteMany"))
    jobs.wait_for("stored", "Accepted", "True")


@pytest.mark.newer  # 1.34 is the first to validate the pod template of a StatefulSet
def test_a_pod_template_that_the_api_server_refuses_is_reported_and_can_be_fixed(jobs: Jobs) -> None:
    deep = json.dumps(make_job("deep", podTemplate={"affinity": {"nodeAffinity": "DEEP"}}))
    deep = deep.replace('"DEEP"', '{"a":' * 3000 + "1" + "}" * 3000)
    path = f"/apis/training.grpo.dev/v1alpha1/namespaces/{jobs.namespace}/grpojobs"
    jobs("create", "--raw", path, "-f", "-", stdin=deep)
    why = ("get", "grpo", "deep", "-o", "jsonpath={.status.conditions[?(@.type=='Accepted')].message}")
    wait_until(lambda: jobs(*why) == "spec.podTemplate.affinity.nodeAffinity: nested too deeply", "the refusal", 60)
    jobs("delete", "grpo", "deep")
    jobs.apply(make_job("template", podTemplate={"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}))
    condition = jobs.wait_for("template", "Accepted", "False", "InvalidSpec")
    assert condition["message"].startswith("spec.podTemplate.volumes[0].hostPath: ")
    bad = {"podTemplate": {"volumes": [{"name": "x"}], "volumeMounts": [{"name": "nothing", "mountPath": "/x"}]}}
    jobs.apply(make_job("template", **bad))
    condition = jobs.wait_for("template", "Accepted", "False", "InvalidPodTemplate")
    assert "volumeMounts" in condition["message"]
    odd = {"resources": {"limits": None, "limit": {"cpu": "1"}}, "affinity": {"nodeAffinity": None}}
    jobs.apply(make_job("template", podTemplate={"volumes": [], "volumeMounts": [], **odd}))
    unknown = 'unknown field "spec.template.spec.containers[0].resources.limit"'
    wait_until(lambda: unknown in jobs.condition("template", "Accepted")["message"], "the unknown field", 60)
    assert not jobs.list("statefulset,service,configmap", "training.grpo.dev/job=template")
    odd["resources"] = {"limits": None}
    sidecar = {"name": "proxy", "image": "p", "restartPolicy": "Always"}
    spread = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    odd |= {"initContainers": [{"name": "get", "image": "g"}, sidecar], "topologySpreadConstraints": [spread]}
    common = {"commonLabels": {"team": "x"}, "commonAnnotations": {"owner": "me"}}
    jobs.run("template", podTemplate={"volumes": [], "volumeMounts": [], **odd}, **common)
    kinds = ["StatefulSet", "Service", "ConfigMap", "NetworkPolicy", "Pod"]
    assert {one["kind"] for one in jobs.list(",".join(kinds), "team=x")} == set(kinds)
