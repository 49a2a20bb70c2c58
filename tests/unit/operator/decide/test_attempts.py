"""When an attempt begins: after acceptance, a failure and its wait, or a suspension; never next to old pods."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from grpo_operator.api.names import LABEL_JOB, LABEL_JOB_UID, Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.conditions import find, holds
from grpo_operator.decide.objects import owner_of
from grpo_operator.decide.observe import Observed, observe, read_child, read_pods
from grpo_operator.decide.plan import Deletion, Mode, plan
from support.control_plane.jobs import NOW, observed, pod, world
from support.control_plane.passes import SERVER, A, B, Case, all_ready, failed

HOLD = "example.com/hold"
HELD = {"deletionTimestamp": rfc3339(NOW), "finalizers": [HOLD]}


def test_the_first_pass_accepts_the_job_and_begins_attempt_0() -> None:
    first = Case().last
    assert first.status.attempt == 0
    assert first.mode == Mode.RUN
    assert find(first.status, Condition.ACCEPTED).message == "3 ranks on 2 pods (a 1 x 2, b 1 x 1)"
    assert [e.reason for e in first.events] == ["Accepted", "RestartsFromStepZero"]


def _made(kind: str, name: str, owner: tuple[str, ...] | None, job: str = "earlier", **more: Any) -> dict[str, Any]:
    """Return an object of a job called job. `owner`: kind, name and UID."""
    refs = [{"kind": owner[0], "name": owner[1], "uid": owner[2], "controller": True}] if owner else []
    labels = {LABEL_JOB: "job", LABEL_JOB_UID: job}
    return {"kind": kind, "metadata": {"name": name, "uid": name, "labels": labels, "ownerReferences": refs, **more}}


def _seen(pods: list[dict[str, Any]], others: list[dict[str, Any]], members: Collection[str] = ()) -> Observed:
    owned = [(owner_of(one), read_child(one["kind"], one)) for one in others]
    return observe("uid", pods=read_pods(pods), others=owned, members=members, gone_sets=["earlier-set"])


def test_what_an_earlier_job_of_the_name_abandoned_is_deleted() -> None:
    """Garbage collection missed that its owner was replaced. What has another owner, or none, is left alone, and not
    waited for.
    """
    seen = _seen(
        pods=[
            _made("Pod", "left-0", ("StatefulSet", "left", "earlier-set")),
            _made("Pod", "of-another-0", ("StatefulSet", "of-another", "of-another")),
        ],
        others=[
            _made("Service", "left", ("GRPOJob", "job", "earlier")),
            _made("ConfigMap", "ending", ("GRPOJob", "job", "earlier"), **HELD),
            _made("ConfigMap", "orphan", None),
            _made("StatefulSet", "of-another", ("GRPOJob", "other", "earlier")),
        ],
    )
    waiting = plan(*world(), GRPOJobStatus(), seen, {}, NOW)
    assert waiting.deletions == (Deletion("Pod", "left-0", "left-0"), Deletion("Service", "left", "left"))
    assert (waiting.status.attempt, waiting.mode) == (None, Mode.KEEP)
    assert seen.foreign == ("pod/left-0", "service/left", f"configmap/ending (its finalizers hold it: {HOLD})")
    assert seen.foreign[-1] in find(waiting.status, Condition.SCHEDULED).message
    assert seen.strange_pods == ("of-another-0",)


def test_a_job_owns_what_its_uid_controls_and_labels_say_nothing() -> None:
    """`kubectl expose` and `kubectl debug --copy-to --keep-labels` copy a pod's labels."""
    ours = ("GRPOJob", "job", "uid")
    group = _made("StatefulSet", A[:-2], ours, job="another label")
    download = _made("Job", "job-download", ours, job="another label")
    copied = [_made("Service", A, None, job="uid"), _made("ConfigMap", "theirs", ("Deployment", "job", "uid"))]
    pods = [
        _made("Pod", A, ("StatefulSet", A[:-2], A[:-2]), job="another label"),
        _made("Pod", "of-a-job", ("Job", "job-download", "job-download"), job="another label"),
        _made("Pod", "copy", None, job="uid"),
        _made("Pod", "of-a-copy-0", ("StatefulSet", "of-a-copy", "not ours"), job="uid"),
        _made("Pod", "left-0", ("StatefulSet", "left", "earlier-set"), job="uid"),
        _made("Pod", "orphan-0", None, job="uid"),
    ]
    seen = _seen(pods, [group, download, *copied], members=["orphan-0"])
    assert [child.name for child in seen.children] == [A[:-2], "job-download"]
    assert {*seen.pods} == {A, "of-a-job", "left-0", "orphan-0"}, "the set of one is gone, another is in status.members"
    assert (seen.foreign, seen.abandoned) == ((), ())
    assert seen.strange_pods == ("copy", "of-a-copy-0")


def test_a_pod_that_lost_its_owner_is_waited_for_never_deleted_and_named() -> None:
    """As after `kubectl delete statefulset --cascade=orphan` of a job that is then suspended."""
    case, _ = all_ready()
    case.edit(suspend=True)
    orphan = pod(A, uid=f"{A}-0", ready=True, is_orphan=True)
    assert not case.see(orphan, at=10).deletions
    said = find(case.status, Condition.SCHEDULED)
    assert (said.reason, find(case.status, Condition.SUSPENDED).reason) == ("PodStuck", "Suspending")
    assert said.message.endswith("has lost its owner, so no StatefulSet ends it: delete it")


def test_a_pod_whose_statefulset_was_replaced_is_deleted_once_it_should_end() -> None:
    case, _ = all_ready(failurePolicy={"backoffSeconds": 0})
    kept = pod(B, uid=f"{B}-0", ready=True)
    owned = replace(kept, controller="replaced")
    assert not case.see(pod(A, uid=f"{A}-0", ready=True), owned).deletions
    case.see(failed(A), owned)
    assert case.see(owned, at=1).deletions == (Deletion("Pod", B, kept.uid),)
    assert not case.see(kept, at=1).deletions


def test_the_next_attempt_begins_once_all_pods_are_gone_and_the_wait_is_over() -> None:
    case, pods = all_ready(failurePolicy={"backoffSeconds": 100})
    stopped = case.see(failed(A, at=5), *pods[1:], at=6)
    assert stopped.mode == Mode.STOPPED
    assert stopped.status.phase == "Restarting"
    assert (stopped.status.restarts.total, stopped.status.restarts.counted) == (1, 1)
    assert "restart 1 of 3; next attempt not before 2026-01-01T00:0" in case.message(Condition.RESTARTING)
    assert [e.reason for e in stopped.events] == ["Restarting"]
    assert case.status.last_failure.attempt == 0
    assert case.see(*pods, at=300).status.attempt == 0, "a pod is left"
    assert case.message(Condition.RESTARTING).endswith(f"; it waits for 2 pods that still end: {A}, {B}")
    ends = [replace(one, deletion_time=after(NOW, 600 + at)) for at, one in enumerate(pods)]
    case.see(*ends, at=305)
    late = f"{A}, {B}; kubelets kill what has not ended by {rfc3339(after(NOW, 601))}"
    assert case.message(Condition.RESTARTING).endswith(late)
    case.see(*pods[1:], at=310)
    assert case.message(Condition.RESTARTING).endswith(f"; it waits for 1 pod that still ends: {B}")
    assert case.see(at=50).status.attempt == 0, "the wait is not over"
    begun = case.see(at=130)
    assert (begun.status.attempt, begun.status.members, begun.mode) == (1, (), Mode.RUN)
    assert not holds(begun.status, Condition.RESTARTING)
    case.see_all_ready(at=140)
    assert case.status.phase == "Running"


def test_a_pod_of_an_earlier_attempt_is_deleted_and_never_recorded() -> None:
    case, _ = all_ready(failurePolicy={"backoffSeconds": 0})
    case.see(failed(A))
    case.see(at=1)
    assert case.status.attempt == 1
    late = case.see(pod(A, uid="late", attempt=0, ready=True), at=2)
    assert late.deletions == (Deletion("Pod", A, "late"),)
    assert case.status.members == ()


def test_suspension_ends_trainers_first_then_engines_and_resumes_in_a_new_attempt() -> None:
    case, pods = all_ready(**SERVER)
    case.edit(**SERVER, suspend=True)
    saving = case.see(*pods, at=10)
    assert (saving.mode, saving.status.phase) == (Mode.ENGINES_ONLY, "Suspended")
    said = find(saving.status, Condition.SUSPENDED)
    assert (said.status, said.reason) == ("False", "Suspending"), "True once no pod is left"
    assert said.message.startswith("4 pods are saving and ending: ")
    assert [event.reason for event in saving.events] == ["Suspending"]
    assert holds(saving.status, Condition.RECONCILING)
    engines = [one for one in pods if "gen" in one.name]
    assert case.see(*engines, at=20).mode == Mode.STOPPED
    case.see(at=30)
    said = find(case.status, Condition.SUSPENDED)
    assert (said.status, said.reason) == ("True", "Suspended")
    assert case.status.attempt == 0
    assert {c.type for c in case.status.conditions if c.status == "True"} == {"Accepted", "Suspended"}
    case.edit(**SERVER)
    resumed = case.see(at=40)
    assert (resumed.status.attempt, resumed.status.restarts.total, resumed.mode) == (1, 0, Mode.RUN)


def test_a_job_that_is_resumed_while_pods_save_says_which() -> None:
    case, pods = all_ready()
    case.edit(suspend=True)
    case.see(*pods, at=10)
    case.edit()
    case.see(pods[0], at=20)
    assert case.message(Condition.SUSPENDED) == f"1 pod is saving and ending: {A}"
    assert case.see(at=30).status.attempt == 1


def test_what_keeps_the_pods_that_are_left_is_said_of_a_suspension_and_of_a_restart() -> None:
    gone = {"deletion_time": after(NOW, 40)}
    held = pod(A, uid=f"{A}-0", finalizers=HOLD, **gone)
    silent = pod(B, uid=f"{B}-0", node="far", **gone)
    lost = {"lost_nodes": {"far": after(NOW, 5)}}
    why = f"{A} (its finalizers hold it: {HOLD}), {B} (its node far has not been ready since 2026-01-01T00:00:05Z)"
    case, _ = all_ready()
    case.edit(suspend=True)
    case.see(held, silent, at=10, **lost)
    assert case.message(Condition.SUSPENDED) == f"2 pods are saving and ending: {why}"
    case.see(silent, at=150, absent_nodes=frozenset({"far"}), **lost)
    assert case.message(Condition.SUSPENDED) == f"1 pod is saving and ending: {B} (its node far no longer exists)"
    case.see(replace(silent, node="near"), at=150)
    late = f"on node near, it did not end with its grace period at {rfc3339(after(NOW, 40))}"
    assert case.message(Condition.SUSPENDED) == f"1 pod is saving and ending: {B} ({late})"

    case, pods = all_ready(failurePolicy={"backoffSeconds": 100})
    case.see(failed(A, at=5), pods[1], at=6)
    case.see(pods[0], pods[1], at=8)
    assert "it waits for" not in case.message(Condition.RESTARTING), "the back-off runs, and all is well"
    ends = case.status.next_restart_time
    now = plan(case.job, case.topology, case.status, observed(pods[0], pods[1]), {}, ends)
    assert f"it waits for 2 pods that still end: {A}, {B}" in find(now.status, Condition.RESTARTING).message
    case.see(held, silent, at=10, **lost)
    assert "next attempt not before 2026-01-01T00:0" in case.message(Condition.RESTARTING)
    assert case.message(Condition.RESTARTING).endswith(f"; it waits for 2 pods that still end: {why}")
    case.see(at=300, foreign=("service/job",))
    left = "; it waits for objects of an earlier job of the same name: service/job"
    assert case.message(Condition.RESTARTING).endswith(left)


def test_a_job_that_is_resumed_waits_for_what_an_earlier_job_left_and_says_so() -> None:
    case, _ = all_ready()
    case.edit(suspend=True)
    case.see(at=10)
    assert (case.status.phase, holds(case.status, Condition.RECONCILING)) == ("Suspended", False)
    case.edit()
    case.see(at=20, foreign=("service/job",))
    said = find(case.status, Condition.SUSPENDED)
    assert (said.status, said.reason) == ("False", "WaitingForOldChildren")
    assert said.message.endswith("are deleted: service/job")
    assert (holds(case.status, Condition.RECONCILING), case.last.requeue_after) == (True, 10)
    assert case.see(at=30).status.attempt == 1


def test_a_job_suspended_from_the_start_begins_no_attempt_until_it_is_resumed() -> None:
    case = Case(suspend=True)
    assert (case.last.mode, case.status.phase, case.status.attempt) == (Mode.KEEP, "Suspended", None)
    case.edit()
    assert case.see(at=10).status.attempt == 0
