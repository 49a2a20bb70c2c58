"""The operator against a real API server, controller manager and scheduler; the kubelet's words are put in by the tests."""

import json
from collections import Counter

import audit
import pytest
from click.testing import CliRunner
from operator_fixture import ROOT, USER, Jobs, Operator, make_job, outcome, wait_for_crd

from grpo_cli.main import main as grpo
from grpo_devcluster import kube
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until

pytestmark = pytest.mark.api

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "runs"},
    "spec": {"resources": {"requests": {"storage": "1Gi"}}},
}


def _claim(mode: str) -> dict:
    return CLAIM | {"spec": CLAIM["spec"] | {"accessModes": [mode]}}


def _replicas(jobs: Jobs, name: str) -> dict[str, int]:
    return {s["metadata"]["name"]: s["spec"]["replicas"] for s in jobs.list("statefulset", f"training.grpo.dev/job={name}")}


ONCE = {"maxRestarts": 0}


def _run(jobs: Jobs, name: str, **spec: object) -> None:
    jobs.apply(make_job(name, **spec))
    jobs.wait_for(name, "Running", "True")


def test_groups_with_different_gpus_become_one_world(jobs: Jobs) -> None:
    _run(jobs, "world")
    pods = {p["metadata"]["name"]: p for p in jobs.list("pod", "training.grpo.dev/job=world")}
    limits = {name: pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for name, pod in pods.items()}
    assert limits == {"world-a-0": "2", "world-b-0": "1"}
    contract = json.loads(jobs.get("configmap", "world-0")["data"]["contract.json"])
    assert [(m["pod"], m["rankOffset"], m["gpus"]) for m in contract["members"]] == [("world-a-0", 0, 2), ("world-b-0", 2, 1)]
    assert contract["members"][0]["host"] == f"world-a-0.world.{jobs.namespace}.svc"
    columns = jobs("get", "grpo", "world").split()
    assert "Running" in columns
    assert "2/2" in columns
    assert "Message" in jobs("get", "grpo", "-o", "wide").replace("MESSAGE", "Message")
    assert "world" in jobs("get", "all")


def test_complete_once_every_pod_is_done_and_scaled_to_zero(jobs: Jobs) -> None:
    _run(jobs, "done")
    progress = {"step": 5, "totalSteps": 5, "reward": 0.75, "checkpointStep": 5, "checkpoint": "ns/done/uid/checkpoints/step-5"}
    jobs.finish_pod("done-b-0", 0, outcome(0))
    assert _replicas(jobs, "done") == {"done-a": 1, "done-b": 1}
    jobs.finish_pod("done-a-0", 0, outcome(0, progress=progress))
    told = jobs.wait_for("done", "Complete", "True", "TrainingDone")
    assert "checkpoint ns/done/uid/checkpoints/step-5" in told["message"]
    wait_until(lambda: _replicas(jobs, "done") == {"done-a": 0, "done-b": 0}, "StatefulSets at 0", 30)
    status = jobs.get("grpo", "done")["status"]
    assert status["phase"] == "Succeeded"
    assert status["summary"]["step"] == "5/5"
    assert status["progress"]["reward"] == 0.75
    assert {m["pod"]: m["outcome"]["exitCode"] for m in status["members"]} == {"done-a-0": 0, "done-b-0": 0}
    jobs("wait", "--for=condition=Complete", "grpo/done", "--timeout=1s")


def test_the_pod_that_failed_first_is_named_and_not_the_one_that_lost_it(jobs: Jobs) -> None:
    _run(jobs, "broken", failurePolicy=ONCE)
    jobs.finish_pod("broken-a-0", 69, outcome(69, "PeerLost", "broken-b-0 is gone"))
    jobs.finish_pod("broken-b-0", 70, outcome(70, "RankFailed", "rank 2: RuntimeError: no luck", rank=2))
    told = jobs.wait_for("broken", "Failed", "True", "RankFailed")
    assert "pod broken-b-0 on node kwok-" in told["message"]
    assert "no luck" in told["message"]
    failure = jobs.get("grpo", "broken")["status"]["lastFailure"]
    assert (failure["pod"], failure["exitCode"]) == ("broken-b-0", 70)
    wait_until(lambda: set(_replicas(jobs, "broken").values()) == {0}, "StatefulSets at 0", 30)


def test_a_replaced_pod_ends_the_attempt(jobs: Jobs) -> None:
    _run(jobs, "replaced", failurePolicy=ONCE)
    jobs("delete", "pod", "replaced-b-0", "--force", "--grace-period=0")
    told = jobs.wait_for("replaced", "Failed", "True", "PodReplaced")
    assert "replaced-b-0" in told["message"]


def test_a_replaced_pod_is_seen_by_an_operator_that_was_down(jobs: Jobs, operator: Operator) -> None:
    _run(jobs, "away", failurePolicy=ONCE)
    uid = jobs.get("pod", "away-b-0")["metadata"]["uid"]
    with operator.down():
        jobs("delete", "pod", "away-b-0", "--force", "--grace-period=0")
        wait_until(lambda: any(p["metadata"]["uid"] != uid for p in jobs.list("pod", "training.grpo.dev/group=b")), "another pod", 20)
    jobs.wait_for("away", "Failed", "True", "PodReplaced")


def test_a_job_deleted_while_the_operator_is_down_leaves_nothing(jobs: Jobs, operator: Operator) -> None:
    _run(jobs, "gone")
    assert not jobs.get("grpo", "gone")["metadata"].get("finalizers")
    with operator.down():
        jobs("delete", "grpo", "gone", "--timeout=60s")
        left = "statefulset,service,configmap,pod"
        wait_until(lambda: not jobs.list(left, "training.grpo.dev/job=gone"), "children collected", 30)


def test_a_job_made_anew_at_once_under_its_name_gets_its_own_children(jobs: Jobs) -> None:
    _run(jobs, "again")
    old = jobs.get("grpo", "again")["metadata"]["uid"]
    jobs("delete", "grpo", "again", "--cascade=background")
    jobs.apply(make_job("again"))
    jobs.wait_for("again", "Running", "True")
    new = jobs.get("grpo", "again")["metadata"]["uid"]
    owners = {c["metadata"]["labels"]["training.grpo.dev/job-uid"] for c in jobs.list("pod,statefulset", "training.grpo.dev/job=again")}
    assert owners == {new}
    assert new != old


def test_a_steady_state_writes_nothing(jobs: Jobs, control_plane: ControlPlane) -> None:
    _run(jobs, "steady")

    def requests() -> tuple[int, int]:
        """Reads of the job and writes of anything, by the operator, in this namespace."""
        reads = writes = 0
        for event in audit.requests(control_plane.audit_log, USER):
            about = event["objectRef"]
            if about.get("namespace") != jobs.namespace:
                continue
            reads += event["verb"] == "get" and about["resource"] == "grpojobs"
            writes += event["verb"] not in ("get", "list", "watch")
        return reads, writes

    reads, writes = requests()
    for number in range(4):
        jobs("annotate", "pod", "steady-a-0", f"wakes={number}", "--overwrite")
    wait_until(lambda: requests()[0] >= reads + 4, "four more passes", 30, interval=0.5)
    assert requests()[1] == writes


def test_a_pass_that_finds_nothing_to_do_lists_and_reads_no_child_one_by_one(jobs: Jobs, control_plane: ControlPlane) -> None:
    _run(jobs, "listed")

    def requests() -> Counter[tuple[str, str]]:
        events = audit.requests(control_plane.audit_log, USER)
        return Counter((e["verb"], e["objectRef"]["resource"]) for e in events if e["objectRef"].get("namespace") == jobs.namespace)

    before = requests()
    jobs("annotate", "pod", "listed-a-0", "wakes=now")
    kinds = ("pods", "services", "networkpolicies", "configmaps", "statefulsets")
    wait_until(lambda: (requests() - before)["list", "statefulsets"] >= 1, "one more pass", 30, interval=0.5)
    assert set(requests() - before) <= {("get", "grpojobs"), ("create", "events"), *(("list", kind) for kind in kinds)}


def test_a_child_removed_or_changed_by_hand_is_mended(jobs: Jobs) -> None:
    _run(jobs, "mended")
    jobs("delete", "service", "mended")
    jobs("scale", "statefulset", "mended-b", "--replicas=3")
    wait_until(lambda: _replicas(jobs, "mended")["mended-b"] == 1, "the scale is back", 20)
    wait_until(lambda: len(jobs.list("service", "training.grpo.dev/job=mended")) == 1, "the Service is back", 30)


def test_nothing_foreign_is_adopted_and_the_job_starts_once_it_is_gone(jobs: Jobs) -> None:
    jobs("create", "service", "clusterip", "taken", "--tcp=80")
    jobs.apply(make_job("taken"))
    told = jobs.wait_for("taken", "Accepted", "False", "NameTaken")
    assert "Service taken exists and belongs to nobody: refusing to adopt it" in told["message"]
    assert not jobs.list("statefulset", "training.grpo.dev/job=taken")
    jobs("delete", "service", "taken")
    jobs.wait_for("taken", "Running", "True")


def test_a_claim_must_exist_and_be_shared_before_the_job_is_accepted(jobs: Jobs) -> None:
    jobs.apply(make_job("stored", claim="runs"))
    told = jobs.wait_for("stored", "Accepted", "False", "ClaimNotFound")
    assert "spec.storage.claimName" in told["message"]
    assert jobs.get("grpo", "stored")["status"]["phase"] == "Invalid"
    jobs.apply(_claim("ReadWriteOnce"))
    told = jobs.wait_for("stored", "Accepted", "False", "ClaimNotReadWriteMany")
    assert "use ReadWriteMany" in told["message"]
    assert not jobs.list("statefulset", "training.grpo.dev/job=stored")
    jobs("delete", "pvc", "runs")
    jobs.apply(_claim("ReadWriteMany"))
    jobs.wait_for("stored", "Accepted", "True")


def test_a_pod_template_the_api_server_refuses_is_told_and_can_be_mended(jobs: Jobs) -> None:
    bad = {"podTemplate": {"volumes": [{"name": "x"}], "volumeMounts": [{"name": "nothing", "mountPath": "/x"}]}}
    jobs.apply(make_job("template", **bad))
    told = jobs.wait_for("template", "Accepted", "False", "InvalidPodTemplate")
    assert "volumeMounts" in told["message"]
    assert not jobs.list("statefulset,service,configmap", "training.grpo.dev/job=template")
    jobs.apply(make_job("template", podTemplate={"volumes": [], "volumeMounts": []}))
    jobs.wait_for("template", "Running", "True")


def test_pods_that_do_not_fit_say_why(jobs: Jobs) -> None:
    jobs.apply(make_job("huge", trainer={"groups": [{"name": "a", "gpus": 8}, {"name": "b", "gpus": 64}]}, training={"promptsPerStep": 72}))
    told = jobs.wait_for("huge", "Scheduled", "False", "Unschedulable")
    assert "huge-b-0" in told["message"]
    assert "Insufficient nvidia.com/gpu" in told["message"]
    events = jobs("events", "--for", "grpojob/huge")
    assert events.count("Unschedulable") == 1


def test_events_are_told_once(jobs: Jobs) -> None:
    _run(jobs, "told")
    jobs.finish_pod("told-a-0", 0, outcome(0))
    jobs.finish_pod("told-b-0", 0, outcome(0))
    jobs.wait_for("told", "Complete", "True")
    events = json.loads(jobs("get", "events.events.k8s.io", "-o", "json"))["items"]
    reasons = sorted(e["reason"] for e in events if e["regarding"]["kind"] == "GRPOJob")
    assert reasons == ["Accepted", "Complete", "RestartsFromStepZero", "Running", "Scheduled"]


def test_pods_of_every_topology_pass_the_restricted_policy(jobs: Jobs, kubectl) -> None:
    kubectl("label", "namespace", jobs.namespace, "pod-security.kubernetes.io/enforce=restricted")
    roomy = {"trainer": {"groups": [{"name": "a", "gpus": 4}]}, "training": {"promptsPerStep": 8}}
    jobs.apply(make_job("colocate", **roomy))
    jobs.apply(make_job("server", **roomy, generation={"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}]}}))
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


def test_an_operator_that_comes_before_its_crd_waits_for_it(tmp_path) -> None:
    with ControlPlane(tmp_path / "plane", audit=False) as plane:
        early = Operator(plane.kubeconfig, tmp_path / "operator.log")
        early.start()
        try:
            wait_until(lambda: "has no grpojobs.training.grpo.dev" in early.log.read_text(), "the operator's complaint", 30)
            told = CliRunner().invoke(grpo, ["list", "--kubeconfig", str(plane.kubeconfig)])
            assert (told.exit_code, told.stderr.count("\n")) == (4, 1)
            assert "has no grpojobs.training.grpo.dev: install the operator" in told.stderr
            jobs = Jobs(lambda *args, stdin=None: kube.kubectl(plane.kubeconfig, *args, stdin=stdin), "default")
            jobs("apply", "--server-side", "-f", str(ROOT / "crds"))
            wait_for_crd(jobs)
            jobs.apply(make_job("early"))
            jobs.wait_for("early", "Accepted", "True", timeout=60)
            # An API server that has only just learned of GRPOJobs refuses children that are theirs: nothing is wrong with the job.
            reasons = {event["reason"] for event in json.loads(jobs("get", "events.events.k8s.io", "-o", "json"))["items"]}
            assert "Accepted" in reasons
            assert "InvalidPodTemplate" not in reasons
        finally:
            early.kill()
