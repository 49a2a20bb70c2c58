"""A job in a queue of Kueue runs only while it is admitted, and holds quota only while it may run."""

from dataclasses import replace
from typing import Any

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import rfc3339
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import holds
from grpo_operator.decide.observe import Child, read_child
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import Mode, Obstacle, Plan
from grpo_operator.decide.queueing import find_admitted
from grpo_operator.layout.job import Queue
from grpo_operator.layout.queueing import read_admission, workload
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from support.control_plane.jobs import NOW, ended, observed, pod
from support.control_plane.passes import SERVER, A, B, Case, failed

ADMITTED = (("QuotaReserved", "True"), ("Admitted", "True"))
EVICTED = (*ADMITTED, ("Evicted", "True"))


def made(case: Case, *conditions: tuple[str, str], said: str = "said", **more: Any) -> Child:
    """Return the Workload of a job as it is now, with these conditions."""
    raw = workload(case.job, case.topology)
    raw["metadata"] |= {"uid": f"uid-{raw['metadata']['name']}", "resourceVersion": "7", "generation": 1}
    found = [
        {"type": kind, "status": value, "reason": "Preempted", "message": said, "lastTransitionTime": rfc3339(NOW)}
        for kind, value in conditions
    ]
    groups = [{"name": group.name, "count": 1} for group in case.topology.groups]
    raw["status"] = {"conditions": found, "admission": {"clusterQueue": "cq", "podSetAssignments": groups}}
    raw["spec"] |= more
    return read_child("Workload", raw)


class Queued(Case):
    """A job in a queue."""

    def __init__(self, **spec: Any) -> None:
        self.edit(**spec)
        self.status = GRPOJobStatus()
        self.workload: Child | None = None

    def edit(self, **spec: Any) -> None:
        super().edit(**spec)
        self.job = replace(self.job, queue=Queue("team"))

    def see(self, *pods: ObservedPod, at: int = 0, **more: Any) -> Plan:
        there = (self.workload,) if self.workload else ()
        seen = observed(*pods, children=there)
        granted = find_admitted(self.job, self.topology, seen)
        admission = read_admission(granted.raw, {}) if granted else None
        between = is_between_attempts(self.status)
        self.job = replace(self.job, admission=admission if between else self.status.admission)
        return super().see(*pods, at=at, children=there, **{"has_queues": True} | more)


def running(**spec: Any) -> tuple[Queued, list[ObservedPod]]:
    """Return a job that was admitted and runs, with its pods."""
    case = Queued(**spec)
    case.workload = made(case, *ADMITTED)
    case.see()
    pods = case.see_all_ready()
    assert case.status.phase == "Running"
    return case, pods


def conditions(last: Plan) -> dict[str, tuple[str, str]]:
    """Return the conditions that the plan writes into the only Workload."""
    ((_, status),) = last.queue.patches
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_it_asks_before_it_has_pods_and_begins_once_it_is_admitted() -> None:
    case = Queued()
    asked = case.see()
    assert (asked.queue.create, asked.mode, asked.requeue_after) == (True, Mode.KEEP, None)
    assert (asked.status.phase, asked.status.summary.reason, asked.status.attempt) == ("Pending", "Queued", None)
    assert holds(asked.status, Condition.ACCEPTED)

    case.workload = made(case, ("QuotaReserved", "False"), said="insufficient quota")
    waits = case.see(at=1)
    assert not waits.queue
    name = case.workload.name
    assert waits.status.summary.message == f"waits in LocalQueue team as Workload {name}: insufficient quota"

    case.workload = made(case, ("QuotaReserved", "True"), ("Admitted", "False"), said="checks are not ready")
    assert case.see(at=2).status.summary.message.endswith("checks are not ready")

    case.workload = made(case, *ADMITTED)
    begun = case.see(at=3)
    assert (begun.status.attempt, begun.mode) == (0, Mode.RUN)
    assert begun.status.admission.workload == name


def test_kueue_is_told_when_pods_are_ready_and_when_they_are_not_any_more() -> None:
    case, pods = running()
    assert conditions(case.see(*pods))["PodsReady"] == ("True", "Started")
    case.workload = made(case, *ADMITTED, ("PodsReady", "True"))
    waits = case.see(failed(A, at=5), *pods[1:], at=5)
    assert conditions(waits)["PodsReady"] == ("False", "WaitForRecovery")
    raw = case.workload.raw
    raw["status"]["conditions"][-1] |= {"status": "False", "reason": "WaitForRecovery"}
    case.workload = read_child("Workload", raw)
    case.see(at=300)
    case.see_all_ready(at=301)
    assert conditions(case.last)["PodsReady"] == ("True", "Recovered")


def test_an_evicted_job_saves_with_its_engines_and_gives_the_quota_back_once_no_pod_is_left() -> None:
    case, pods = running(**SERVER)
    case.workload = made(case, *EVICTED, said="to make room")
    stops = case.see(*pods, at=5)
    assert (stops.mode, stops.status.phase) == (Mode.ENGINES_ONLY, "Suspended")
    assert case.message(Condition.SUSPENDED).startswith("Kueue takes its quota back (Preempted): to make room; 4 pods")
    assert not any("admission" in status for _, status in stops.queue.patches), "pods still hold what the quota is for"
    assert (stops.status.admission, stops.status.restarts.total, stops.status.active_since) == (None, 0, None)

    gone = case.see(at=60)
    ((_, status),) = gone.queue.patches
    assert (status["admission"], status["accumulatedPastExecutionTimeSeconds"]) == (None, 60)
    found = conditions(gone)
    assert found["QuotaReserved"] == ("False", "Pending")
    assert found["Admitted"] == ("False", "NoReservation")
    assert found["Requeued"] == ("True", "Preempted")
    assert (gone.status.phase, gone.status.summary.reason) == ("Pending", "Queued")

    case.workload = made(case, *ADMITTED, ("Evicted", "False"))
    assert case.see(at=90).status.attempt == 1
    assert not holds(case.status, Condition.SUSPENDED)


def test_after_other_evictions_kueue_says_when_the_workload_waits_again() -> None:
    case, _ = running()
    raw = made(case, *EVICTED).raw
    raw["status"]["conditions"][2]["reason"] = "PodsReadyTimeout"
    case.workload = read_child("Workload", raw)
    assert conditions(case.see(at=5))["Requeued"] == ("False", "PodsReadyTimeout")


def test_a_restart_keeps_the_quota() -> None:
    case, pods = running()
    case.see(failed(B, code=ExitCode.RANK_FAILED, at=9), *pods[:1], at=30)
    assert case.status.phase == "Restarting"
    between = case.see(at=31)
    assert (between.queue.removals, between.queue.create, case.status.phase) == ((), False, "Restarting")
    assert case.see(at=300).status.attempt == 1


def test_a_suspended_job_has_no_workload_once_its_pods_are_gone() -> None:
    case, pods = running()
    case.job = replace(case.job, spec=case.job.spec.model_copy(update={"suspend": True}))
    assert not case.see(*pods, at=5).queue.removals
    assert case.see(at=9).queue.removals == (case.workload,)


def test_a_job_that_is_refused_gives_its_place_up() -> None:
    case = Queued()
    case.workload = made(case, *ADMITTED)
    refused = case.see(obstacle=Obstacle(Reason.CLAIM_NOT_FOUND, "no claim"))
    assert (refused.queue.removals, refused.queue.create) == ((case.workload,), False)
    assert refused.status.phase == "Invalid"
    case.workload = None
    assert case.see(at=9).queue.create
    assert case.status.phase == "Pending"


def test_another_request_is_another_workload() -> None:
    case = Queued()
    case.workload = made(case, ("QuotaReserved", "False"))
    before = case.workload
    case.edit(trainer={"groups": [{"name": "a", "gpus": 1}]})
    changed = case.see()
    assert (changed.queue.create, changed.queue.removals) == (True, (before,))
    granted = observed(children=(made(Queued(), *ADMITTED),))
    assert find_admitted(case.job, case.topology, granted) is None, "what is admitted is the request of before"


def test_an_attempt_keeps_the_workload_that_it_began_with() -> None:
    case, pods = running()
    case.edit(scheduling={"topologyKey": "rack"})
    case.job = replace(case.job, queue=None)
    kept = case.see(*pods, at=5)
    assert (kept.mode, kept.queue.removals, kept.queue.create) == (Mode.RUN, (), False)


def test_a_job_that_runs_ends_its_attempt_when_it_gets_a_queue_but_not_when_kueue_is_gone() -> None:
    case, pods = running()
    case.workload = None
    case.see(*pods, at=5)
    assert case.message(Condition.SUSPENDED).startswith("waits in LocalQueue team; 2 pods are saving and ending")
    case, pods = running()
    case.workload = None
    assert case.see(*pods, has_queues=False).mode == Mode.RUN


def test_a_job_that_was_suspended_from_the_start_is_queued_once_it_is_resumed() -> None:
    case = Queued(suspend=True)
    assert case.see().status.phase == "Suspended"
    case.edit()
    resumed = case.see(at=5)
    assert (resumed.status.phase, resumed.status.summary.reason, resumed.queue.create) == ("Pending", "Queued", True)


def test_a_job_that_is_resumed_queues_only_once_nothing_is_left_of_an_earlier_job_of_its_name() -> None:
    case, pods = running()
    case.edit(suspend=True)
    case.see(*pods, at=5)
    case.workload = None
    case.see(at=9)
    case.edit()
    waits = case.see(at=12, foreign=("service/job",))
    assert (waits.queue.create, waits.status.summary.reason) == (False, "WaitingForOldChildren")
    assert case.message(Condition.SUSPENDED).endswith("of the same name are deleted: service/job")
    queued = case.see(at=15)
    assert (queued.queue.create, queued.status.summary.reason) == (True, "Queued")


def test_how_the_job_ended_is_written_once() -> None:
    for code, result in ((0, "Succeeded"), (ExitCode.CONFIG_ERROR, "Failed")):
        case, _ = running()
        ending = Ending(ended(code, "ConfigError" if code else "Done"))
        done = [pod(name, uid=f"{name}-0", endings=(ending,)) for name in (A, B)]
        last = case.see(*done, at=9)
        last = last if last.queue.patches else case.see(*done, at=99)
        assert conditions(last)["Finished"] == ("True", result)
        ((_, status),) = last.queue.patches
        (finished,) = [one for one in status["conditions"] if one["type"] == "Finished"]
        assert finished["message"] == case.message(Condition.FAILED if code else Condition.COMPLETE)
        case.workload = made(case, *ADMITTED, ("Finished", "True"))
        assert not case.see(at=100).queue
