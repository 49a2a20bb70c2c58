"""Environment pods belong to no attempt: it waits for them before it has a pod, and never ends for them."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.api.times import after
from grpo_operator.decide.absent import find_missing
from grpo_operator.decide.deletions import find_deletions, find_left
from grpo_operator.decide.edits import edit
from grpo_operator.decide.observe import Left, observe, read_child, read_pods
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import Mode, Obstacle, Plan
from grpo_operator.decide.queueing import find_steps
from grpo_operator.layout.topology import plan_topology
from grpo_operator.passes.children import groups_to_stop
from support.control_plane.jobs import NOW, a_set, ended, job, observed, pod, spec
from support.control_plane.passes import SERVER, A, Case, all_ready, failed

ENVIRONMENTS: dict[str, Any] = {
    "environments": [{"name": "wordle", "factory": "m:Wordle"}, {"name": "sql", "factory": "m:Sql"}],
    "environmentPods": {
        "groups": [{"name": "boxes", "replicas": 2, "environments": ["wordle"]}, {"name": "rest", "sessions": 8}]
    },
}
REFUSED = "ErrImagePull: no such image"


def box(name: str, **more: Any) -> ObservedPod:
    """Return an environment pod."""
    return pod(name, **{"ready": True, "role": "environment"} | more)


class Environments(Case):
    """A job with environment pods, all of which are ready unless a pass sees others."""

    def __init__(self, **more: Any) -> None:
        self.boxes = [box(f"job-{name}") for name in ("boxes-0", "boxes-1", "rest-0")]
        super().__init__(**ENVIRONMENTS | more)

    def see(self, *pods: ObservedPod, at: int = 0, **more: Any) -> Plan:
        return super().see(*pods, at=at, environment_pods={each.name: each for each in self.boxes}, **more)


def test_no_pod_with_a_gpu_is_asked_for_before_one_environment_pod_of_each_group_is_ready() -> None:
    case = Environments(**SERVER)
    case.boxes = []
    case.status = GRPOJobStatus()
    waits = case.see()
    everything = {"job-a": 0, "job-b": 0, "job-gen": 0}
    assert (waits.mode, waits.limits, case.status.attempt, case.status.phase) == (Mode.RUN, everything, 0, "Pending")
    assert case.status.summary.reason == "WaitingForEnvironments"
    assert case.message(Condition.SCHEDULED) == (
        "no GPU is asked for yet, as no environment pod of boxes, rest is ready: job-boxes-0 does not exist yet"
    )
    case.boxes = [
        box("job-boxes-0", ready=False, waiting=REFUSED),
        box("job-boxes-1", deletion_time=NOW),
        box("job-rest-0"),
    ]
    assert case.see(at=1).limits == everything
    assert case.message(Condition.SCHEDULED).endswith(
        f"no environment pod of boxes is ready: job-boxes-0 on node node: {REFUSED}"
    )
    case.boxes[1] = box("job-boxes-1")
    assert case.see(at=2).limits == {"job-b": 0, "job-gen": 0}, "as without: those with more GPUs come first"
    assert [(one.name, one.role, one.ready, one.desired) for one in case.status.groups[-2:]] == [
        ("boxes", "environment", 1, 2),
        ("rest", "environment", 1, 1),
    ]
    assert case.status.summary.environments == "2/3"


@pytest.mark.parametrize("code", [64, 1])
def test_a_users_mistake_that_one_finds_ends_the_job_while_no_rank_is_there_to_hear_of_it(code: int) -> None:
    said = "environments[wordle].factory: module 'm' does not exist"
    mistake = Ending(edit(ended(code, "ConfigError"), message=said), 0)
    case = Environments()
    case.boxes[0] = box("job-boxes-0", ready=False, endings=(mistake,))
    assert case.see(at=1).limits == {"job-b": 0}, "another one of its group is ready, and ranks are told why"
    assert case.status.phase == "Pending"
    case.boxes[1] = box("job-boxes-1", ready=False)
    ends = case.see(at=2)
    assert (ends.mode, case.status.phase, case.status.restarts.total) == (Mode.STOPPED, "Failed", 0)
    assert case.message(Condition.FAILED) == (
        f"environment pod job-boxes-0 on node node, exit code {code}: {said}; a restart would fail on the same settings"
    )
    failure = case.status.last_failure
    assert (failure.reason, failure.role, failure.pod) == ("ConfigError", "environment", "job-boxes-0")


@pytest.mark.parametrize("ending", [Ending(ended(74, "EnvironmentFailed"), 0), Ending(ended(64, "Error"))])
def test_other_ends_of_them_are_waited_for(ending: Ending) -> None:
    case = Environments()
    case.boxes = [replace(each, ready=False, endings=(ending,)) for each in case.boxes]
    case.see(at=1)
    assert case.status.phase == "Pending"
    said = f"ended 1 time; the last one as {ending.outcome.reason}: {ending.outcome.message}"
    assert case.message(Condition.SCHEDULED).endswith(said)


def test_what_they_do_while_it_runs_is_said_and_ends_nothing() -> None:
    case, running = all_ready(Environments, failurePolicy={"maxRestarts": 0})
    assert case.message(Condition.RUNNING) == "all 2 pods are ready, and 3 of 3 environment pods"
    died = Ending(ended(1, "Error"))
    looping = "CrashLoopBackOff: back-off 40s restarting failed container"
    case.boxes[0] = box("job-boxes-0", ready=False, restarts=3, waiting=looping, endings=(died, died))
    case.see(*running, at=10)
    assert case.message(Condition.RUNNING) == (
        "all 2 pods are ready, and 2 of 3 environment pods; job-boxes-0 on node node: ended 3 times, "
        "CrashLoopBackOff; the last one as Error: said Error"
    )
    killed = edit(ended(137, "OOMKilled"), message="")
    case.boxes[0] = box("job-boxes-0", ready=False, endings=(Ending(killed),))
    case.see(*running, at=11)
    assert case.message(Condition.RUNNING).endswith("job-boxes-0 on node node: ended 1 time; the last one as OOMKilled")
    case.boxes = []
    gone = case.see(*running, at=100_000)
    assert (gone.mode, gone.limits, gone.deletions) == (Mode.RUN, {}, ())
    assert (case.status.phase, case.status.attempt, case.status.restarts.total) == ("Running", 0, 0)
    assert case.status.last_failure is None


def test_pods_of_the_attempt_are_not_taken_back_once_there_are_some() -> None:
    case = Environments()
    case.boxes = []
    assert case.see(pod(A, uid="1"), at=5).limits == {}


def test_they_stay_while_one_attempt_follows_another_and_the_next_one_waits_for_them_again() -> None:
    case, _ = all_ready(Environments)
    case.see(failed(A), at=10)
    assert (case.status.phase, case.last.mode) == ("Restarting", Mode.ENVIRONMENTS_ONLY)
    case.boxes = [box(each.name, ready=False) for each in case.boxes]
    case.see(at=100)
    assert (case.status.attempt, case.status.phase) == (1, "Pending")
    assert case.last.limits == {"job-a": 0, "job-b": 0}


def test_a_job_that_is_refused_between_attempts_keeps_none() -> None:
    case, _ = all_ready(Environments)
    case.see(failed(A), at=10)
    assert case.see(at=100, obstacle=Obstacle("ClaimNotFound", "no claim")).mode == Mode.STOPPED


@pytest.mark.parametrize("ends", ["suspended", "complete"])
def test_they_end_after_the_trainer_pods(ends: str) -> None:
    case, running = all_ready(Environments)
    if ends == "complete":
        done = [replace(each, endings=(Ending(ended(0), 0),)) for each in running]
        assert (case.see(*done, at=10).mode, case.status.phase) == (Mode.STOPPED, "Succeeded")
        return
    case.edit(suspend=True, **ENVIRONMENTS)
    assert case.see(*running, at=10).mode == Mode.ENGINES_ONLY
    ends = "5 pods are saving and ending: job-a-0, job-b-0, job-boxes-0, job-boxes-1, job-rest-0"
    assert ends in case.message(Condition.SUSPENDED)
    assert case.see(at=20).mode == Mode.STOPPED
    assert "3 pods are saving and ending: job-boxes-0, job-boxes-1, job-rest-0" in case.message(Condition.SUSPENDED)
    case.boxes = []
    case.see(at=30)
    assert case.message(Condition.SUSPENDED).startswith("no pod is left")


@pytest.mark.parametrize(
    ("mode", "stopped"),
    [(Mode.STOPPED, "abc"), (Mode.ENVIRONMENTS_ONLY, "ab"), (Mode.ENGINES_ONLY, "a"), (Mode.RUN, ""), (Mode.KEEP, "")],
)
def test_each_mode_stops_the_groups_of_some_roles(mode: Mode, stopped: str) -> None:
    children = [a_set("a", "trainer"), a_set("b", "generation"), a_set("c", "environment"), a_set("d", "trainer", 0)]
    assert "".join(child.name for child in groups_to_stop(children, mode)) == stopped


def test_they_are_told_from_pods_of_attempts_by_their_role() -> None:
    labels = {names.LABEL_ROLE: "environment", names.LABEL_JOB_UID: "uid"}
    owner = {"controller": True, "uid": "set", "kind": "StatefulSet", "name": "job-boxes"}
    metadata = {"name": "job-boxes-0", "uid": "1", "labels": labels, "ownerReferences": [owner]}
    seen = observe("uid", pods=read_pods([{"metadata": metadata}]), others=[("uid", a_set("set", "environment"))])
    assert (list(seen.pods), list(seen.environment_pods)) == ([], ["job-boxes-0"])
    assert find_left(seen, NOW) == {"job-boxes-0": Left()}
    assert find_left(seen, NOW, of_attempts=True) == {}


def test_one_that_the_cluster_refuses_is_asked_about_after_those_of_the_attempt() -> None:
    case = Environments()
    seen = observed(children=(a_set("job-boxes", "environment"),))
    assert find_missing(case.status, case.topology, seen).pod == "job-boxes-0"
    trainers = replace(seen, children=(*seen.children, a_set("job-b", "trainer")))
    assert find_missing(case.status, case.topology, trainers).pod == "job-b-0"


def test_one_that_no_kubelet_ends_is_deleted_by_force_and_no_other() -> None:
    case, _ = all_ready(Environments)
    stuck = box("job-boxes-0", deletion_time=NOW)
    seen = observed(lost_nodes={"node": NOW}, environment_pods={stuck.name: stuck, "x": box("x")})
    (deletion,) = find_deletions(case.job, case.status, seen, after(NOW, 1000))
    assert (deletion.name, deletion.force) == ("job-boxes-0", True)


def test_quota_is_given_back_only_when_they_are_gone() -> None:
    case, _ = all_ready(Environments)
    case.edit(suspend=True, **ENVIRONMENTS)
    case.see(at=10)
    metadata = {"name": "w", "uid": "w", "resourceVersion": "1"}
    workload = read_child(names.QUEUE_KIND, {"metadata": metadata, "spec": {}, "status": {}})
    left = observed(children=(workload,), environment_pods={"x": box("x")}, has_queues=True)
    assert find_steps(case.job, case.topology, case.status, left, NOW, refused=False).removals == ()
    gone = replace(left, environment_pods={})
    assert find_steps(case.job, case.topology, case.status, gone, NOW, refused=False).removals == (workload,)


def test_a_job_whose_spec_is_not_understood_keeps_them() -> None:
    case, _ = all_ready(Environments)
    stored = read_spec(spec(trainer=7, **ENVIRONMENTS), case.status)
    assert stored.fault is not None
    assert plan_topology(replace(job(), spec=stored.spec)).environment_pods == case.topology.environment_pods
