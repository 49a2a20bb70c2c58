"""Whatever a pass reads, it does not raise, what it writes fits the CRD, and an attempt that runs is looked after.

Specs, statuses, pods, nodes and answers of launchers begin as a real cluster has them and are changed at random places
into any JSON. A pass is the whole pure core: parsing, observing, planning and building the objects.
"""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus, read_status
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.attempts import is_about_to_begin
from grpo_operator.decide.conditions import find, holds, is_terminal, rests
from grpo_operator.decide.observe import Observed, lost_since, observe, read_child, read_pods
from grpo_operator.decide.plan import Mode, Obstacle, Plan, plan
from grpo_operator.decide.rescue import rescue
from grpo_operator.layout.admission import Allowed, find_fault
from grpo_operator.layout.job import Job
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import plan_topology
from grpo_operator.metrics.jobs import WatchedJob
from grpo_spec.reports import ExitCode, GpuUse, Outcome, Progress, RunWarning
from grpo_spec.schema import dump
from grpo_workload.pod.contract_file import parse_contract
from support.control_plane.jobs import NOW, spec
from support.control_plane.passes import SERVER, A, B, Case, all_ready

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["x" * 5000, "9999-12-31T23:59:59Z", "2026-01-01", "True", "Restarting", "job-a-0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(max_size=8) | st.sampled_from(["suspend", "limits", "nodeAffinity", "type", "name", "max_restarts"])


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """Return a copy of a value that is changed at up to so many places."""
    root = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(0, most))):
        holder: Any = root
        key: Any = ""
        while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 5)):
            holder = holder[key]
            key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if isinstance(holder[key], dict) and draw(st.booleans()):
            holder[key][draw(KEYS)] = draw(JSON)
        elif holder is not root and draw(st.booleans()):
            del holder[key]
        elif holder is not root:
            holder[key] = draw(JSON)
    return root[""]


LABELS = {"job-uid": "uid", "attempt": "0", "group": "a"}


def raw_pod(name: str, outcome: str | None = None) -> dict[str, Any]:
    """Return a pod as the API server shows it; `outcome` is its termination message."""
    ended = {"terminated": {"exitCode": 70, "message": outcome, "finishedAt": rfc3339(NOW), "reason": "Error"}}
    return {
        "metadata": {
            "name": name,
            "uid": f"{name}-0",
            "labels": {f"training.grpo.dev/{key}": value for key, value in LABELS.items()},
            "ownerReferences": [{"kind": "StatefulSet", "name": "set", "uid": "set", "controller": True}],
        },
        "spec": {"nodeName": "node"},
        "status": {
            "podIP": "10.0.0.1",
            "conditions": [
                {"type": "Ready", "status": "False" if outcome else "True"},
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc3339(NOW)},
            ],
            "containerStatuses": [{"name": "grpo", "restartCount": 0, "state": ended if outcome else {"running": {}}}],
        },
    }


def seen(pods: list[dict[str, Any]]) -> Observed:
    """Return what is seen of a job with these pods of its StatefulSet."""
    return observe("uid", pods=read_pods(pods), others=[("uid", read_child("StatefulSet", SET))])


def message(reason: str, text: str, code: int = ExitCode.RANK_FAILED) -> str:
    return Outcome(attempt=0, exit_code=ExitCode(code), reason=reason, message=text).to_message()


SET = {"metadata": {"name": "set", "uid": "set"}, "spec": {"replicas": 1}}
POD_TEMPLATE = {
    "env": [{"name": "KEY", "value": "1"}],
    "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}},
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "volumes": [{"name": "v", "emptyDir": {}}],
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "securityContext": {"runAsUser": 5},
    "tolerations": [{"operator": "Exists"}],
}
SPEC = spec(
    trainer={"groups": [{"name": "a", "gpus": 2, "podTemplate": POD_TEMPLATE}, {"name": "b", "gpus": 1}]},
    podTemplate=POD_TEMPLATE,
    failurePolicy={"maxRestarts": 3, "rules": [{"name": "r", "exitCodes": [3], "action": "Fail"}]},
    activeDeadlineSeconds=1000,
    training={"promptsPerStep": 8},
)
FAILING = [raw_pod(A, message("RankFailed", "rank 0: no luck")), raw_pod(B)]
LEAVING = raw_pod("job-c-0")
LEAVING["metadata"] |= {"deletionTimestamp": rfc3339(NOW), "finalizers": ["a/b"]}
LEAVING["status"]["conditions"] += [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]
NODE = {"status": {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": rfc3339(NOW)}]}}
PROGRESS = json.loads(
    Progress(
        step=3,
        total_steps=9,
        reward=0.5,
        metrics={"loss": 1.0},
        gpu_use=GpuUse(attempt=0, training=9.0, sampling=9.0),
        rank_phases={"0": "Training"},
        warnings=(RunWarning(reason="NoRewardDifference", message="all rewards are equal"),),
        advice="run 3 engines in place of 2",
    ).model_dump_json(by_alias=True)
)


def running() -> dict[str, Any]:
    """Return the status of a job whose attempt runs."""
    case, _ = all_ready()
    return dump(case.status)


RUNNING = running()


def whole_pass(
    raw_spec: Any, raw_status: Any, pods: list[Any], *, node: Any = None, said: Any = None, at: int = 60
) -> tuple[Job, Plan]:
    """Run the pure core on what a pass reads, and check what it would write."""
    now = after(NOW, at)
    status = read_status(raw_status)
    stored = read_spec(raw_spec, status)
    job = Job(namespace="ns", name="job", uid="uid", generation=1, spec=stored.spec, fault=stored.fault)
    topology = plan_topology(job)
    observed = seen(pods)
    lost = {} if node is None else {"node": since} if (since := lost_since(node, now)) else {}
    reports = {} if said is None else {topology.members[0].pod: Progress.read(said)}
    obstacle = None
    if stored.fault is None and is_about_to_begin(job, status, observed, now):
        try:
            manifests(job, topology, 0)
        except ValueError as error:
            obstacle = Obstacle("InvalidPodTemplate", str(error))
        if fault := find_fault(job, Allowed()):
            obstacle = Obstacle("InvalidSpec", fault)
    decided = plan(job, topology, status, replace(observed, lost_nodes=lost), reports, now, obstacle)
    if decided.mode == Mode.RUN and decided.status.attempt != status.attempt:
        assert stored.fault is None, "nothing is built from a spec that is not understood"
        manifests(job, topology, 0, ["node"])
    written = json.loads(json.dumps(dump(decided.status), allow_nan=False))
    assert GRPOJobStatus.model_validate(written) == decided.status, "the API server accepts it, and it is read back"
    WatchedJob.read("ns", "job", written)
    return job, decided


@given(changed(SPEC), changed(RUNNING), changed([*FAILING, LEAVING]), changed(NODE), changed(PROGRESS))
def test_a_pass_never_raises(raw: Any, status: Any, pods: Any, node: Any, said: Any) -> None:
    for pod in pods if isinstance(pods, list) else []:  # the API server sees to these
        assume(isinstance(pod, dict) and isinstance(pod.get("metadata"), dict))
        assume({"name", "uid"} <= pod["metadata"].keys())
        assume(all(isinstance(pod["metadata"][key], str) for key in ("name", "uid")))
        assume(len(pod["metadata"]["name"]) <= 253 and len(pod["metadata"]["uid"]) <= 64)
    assume(isinstance(pods, list) and isinstance(node, dict))
    whole_pass(raw, status, pods, node=node, said=said)
    whole_pass(raw, status, [])


@given(changed(SPEC), st.sampled_from(["trainer", "server"]))
def test_before_the_first_attempt_a_spec_runs_or_is_refused(raw: Any, kind: str) -> None:
    if isinstance(raw, dict) and kind == "server":
        raw = raw | SERVER
    job, decided = whole_pass(raw, {}, [])
    accepted = find(decided.status, Condition.ACCEPTED)
    if accepted is None:
        assert job.spec.suspend
    else:
        assert (accepted.status == "True") == (decided.status.attempt == 0)


@given(changed(SPEC, most=6), changed(PROGRESS))
def test_an_attempt_that_runs_is_never_left_alone(raw: Any, said: Any) -> None:
    job, decided = whole_pass(raw, RUNNING, FAILING, said=said)
    assume(job.fault is not None or [g.name for g in job.spec.trainer.groups] == ["a", "b"])  # they cannot change
    assume((job.spec.active_deadline_seconds or 61) > 60)
    status = decided.status
    acted = is_terminal(status) or holds(status, Condition.RESTARTING) or rests(status)
    assert acted, status
    assert decided.mode == Mode.STOPPED or job.spec.suspend
    if not job.spec.suspend:
        assert (status.last_failure.pod, status.last_failure.message) == (A, "rank 0: no luck")


@given(changed(SPEC, most=6))
def test_suspension_and_deadline_work_with_any_spec_that_says_so(raw: Any) -> None:
    assume(isinstance(raw, dict))
    pods = [raw_pod(A), raw_pod(B)]
    _, suspended = whole_pass(raw | {"suspend": True, "activeDeadlineSeconds": 1000}, RUNNING, pods)
    assert find(suspended.status, Condition.SUSPENDED).reason == "Suspending"
    _, late = whole_pass(raw | {"activeDeadlineSeconds": 100}, RUNNING, pods, at=101)
    assert (late.status.phase, late.status.summary.reason) == ("Failed", "DeadlineExceeded")
    assert late.mode == Mode.STOPPED


def test_a_newer_crd_changes_nothing_but_a_sentence() -> None:
    newer = copy.deepcopy(SPEC) | {"elastic": {"enabled": False}}
    newer["training"]["fancy"] = True
    newer["model"]["revision"] = None
    status = read_status({})
    stored = read_spec(newer, status)
    assert stored.fault is None
    assert stored.ignored == ("spec.training.fancy", "spec.elastic")
    assert stored.spec == read_spec(SPEC, status).spec
    job = Job(namespace="ns", name="job", uid="u", generation=1, spec=stored.spec, ignored=stored.ignored)
    begun = plan(job, plan_topology(job), status, observe("u", pods=[]), {}, NOW).status
    accepted = find(begun, Condition.ACCEPTED)
    assert accepted.message.endswith("does not know, and ignores, spec.training.fancy, spec.elastic")


def test_a_rule_of_a_newer_release_holds_for_jobs_that_have_not_begun() -> None:
    older = copy.deepcopy(SPEC) | {"network": {"rdmaCount": 2}, "storage": {"export": {"everySteps": 1}}}
    older["storage"]["export"]["lora"] = "adapters"
    fault = read_spec(older, read_status({})).fault
    assert "rdmaCount needs rdmaResource" in fault
    stored = read_spec(older, read_status(RUNNING))
    assert stored.fault is None
    job = Job(namespace="ns", name="job", uid="u", generation=1, spec=stored.spec)
    (contract,) = (one for one in manifests(job, plan_topology(job), 1) if one["kind"] == "ConfigMap")
    read = parse_contract(contract["data"]["contract.json"])
    assert read.config.storage.export is not None
    assert read.config.storage.export.lora == "adapters"


def test_conditions_and_fields_of_another_release_are_kept_or_dropped() -> None:
    other = {"type": "Elastic", "status": "True", "reason": "R", "message": "m", "observedGeneration": 1}
    other["lastTransitionTime"] = rfc3339(NOW)
    status = copy.deepcopy(RUNNING) | {"throughput": 7}
    status["conditions"].append(other)
    _, decided = whole_pass(SPEC, status, FAILING)
    assert decided.status.conditions[-1].type == "Elastic"
    assert decided.status.phase == "Restarting"
    without = dump(decided.status)
    del without["lastFailure"]
    _, decided = whole_pass(SPEC, without, FAILING, at=61)
    assert (decided.status.phase, decided.status.summary.reason) == ("Restarting", "Restarting")


def test_an_older_crd_that_lacks_a_section_stops_only_the_next_attempt() -> None:
    older = {key: value for key, value in SPEC.items() if key not in ("dataset", "trainer")}
    job, failing = whole_pass(older, RUNNING, FAILING)
    assert job.fault is not None
    assert failing.status.phase == "Restarting"
    _, gone = whole_pass(older, dump(failing.status), [], at=100)
    assert (gone.status.phase, gone.status.summary.reason) == ("Invalid", "InvalidSpec")
    assert "spec.dataset" in gone.status.summary.message
    assert gone.requeue_after is not None, "the deadline's clock goes on"
    _, late = whole_pass(older, dump(gone.status), [], at=1001)
    assert (late.status.phase, late.status.summary.reason) == ("Failed", "DeadlineExceeded")


def test_a_job_with_an_obstacle_reaches_its_deadline() -> None:
    case, _ = all_ready(activeDeadlineSeconds=100, failurePolicy={"backoffSeconds": 0})
    case.see(at=10)  # all pods are gone
    missing = Obstacle("ClaimNotFound", "create it")
    held = case.see(at=60, obstacle=missing)
    assert (held.status.phase, held.requeue_after) == ("Invalid", 10)
    late = case.see(at=100, obstacle=missing)
    assert (late.status.phase, late.status.summary.reason) == ("Failed", "DeadlineExceeded")


@pytest.mark.parametrize("attempt", ["x", "", "-1", "9" * 30, None, 3])
def test_a_pod_whose_attempt_is_no_number_belongs_to_none(attempt: Any) -> None:
    odd = raw_pod(A)
    odd["metadata"]["labels"]["training.grpo.dev/attempt"] = attempt
    _, decided = whole_pass(SPEC, RUNNING, [odd, raw_pod(B)])
    assert [(d.name, d.force) for d in decided.deletions] == [(A, False)]


def test_a_status_of_a_thousand_failed_pods_is_small_and_its_failure_whole() -> None:
    groups = [{"name": "workers", "replicas": 1000, "gpus": 8}]
    case = Case(trainer={"groups": groups}, training={"promptsPerStep": 8000})
    text = "rank 17: " + "é" * 1500
    pods = [
        raw_pod(f"job-workers-{n}", message("RankFailed" if n == 17 else "PeerLost", text, 70 if n == 17 else 69))
        for n in range(1000)
    ]
    for number, pod in enumerate(pods):
        pod["metadata"]["uid"] = f"0b5f3a52-7c1d-4b57-9b0e-{number:012}"
        pod["spec"]["nodeName"] = f"gpu-node-{number:04}"
    decided = plan(case.job, case.topology, case.status, seen(pods), {}, after(NOW, 60))
    assert (decided.status.last_failure.pod, decided.status.last_failure.message) == ("job-workers-17", text)
    written = json.dumps(dump(decided.status), separators=(",", ":"), ensure_ascii=False).encode()
    assert len(written) < 256 * 1024
    again = plan(case.job, case.topology, decided.status, seen(pods), {}, after(NOW, 61))
    assert again.status.members == decided.status.members


def test_a_pass_that_raised_is_named_once_and_deadline_and_suspension_still_work() -> None:
    job, _ = whole_pass(SPEC, RUNNING, [raw_pod(A), raw_pod(B)])
    pods, failed = {A: "trainer", B: "trainer"}, Obstacle("PassFailed", "planning failed with KeyError: 'x'")
    first = rescue(job, read_status(RUNNING), pods, failed, after(NOW, 5))
    assert [(e.type, e.reason) for e in first.events] == [("Warning", "PassFailed")]
    assert (first.status.phase, first.status.summary.reason) == ("Running", "PassFailed")
    assert first.mode == Mode.KEEP
    again = rescue(job, first.status, pods, Obstacle("PassFailed", "planning failed with KeyError: 'y'"), after(NOW, 9))
    assert again.status == first.status
    other = rescue(job, first.status, pods, Obstacle("PassFailed", "planning failed with OSError: x"), after(NOW, 9))
    assert other.status != first.status
    late = rescue(job, first.status, pods, failed, after(NOW, 1000))
    assert (late.status.phase, late.mode) == ("Failed", Mode.STOPPED)
    paused = replace(job, spec=job.spec.model_copy(update={"suspend": True}))
    assert rescue(paused, first.status, pods, failed, after(NOW, 9)).mode == Mode.ENGINES_ONLY
    assert rescue(paused, first.status, {}, failed, after(NOW, 9)).mode == Mode.STOPPED
