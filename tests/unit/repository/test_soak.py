"""The soak's model: what must come of what was done to a job, what is noticed if it does not, and what is a leak."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from grpo_operator.api.spec import parse_spec
from support.control_plane.operators import make_job
from support.soak.choice import SHAPES, choose, new_spec, possible
from support.soak.differences import ATTEMPT, JOB, KINDS, MANAGED, UID, differences, leftovers
from support.soak.expected import EVICTION, FAILURE, Blow, Count, Expected
from support.soak.health import Sample, leaks, objects_of_no_job, odd_errors

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = {**SHAPES["uneven"], "failurePolicy": {"maxRestarts": 1}}


def at_rest(phase: str = "Running", counted: int = 0, **spec: Any) -> Expected:
    """A job that was just seen at rest."""
    status = {"phase": phase, "restarts": {"total": counted, "counted": counted}, "attempt": counted}
    return Expected(name="job-0", uid="1", spec=SPEC | spec).seen(status)


def world(job: Expected, **status: Any) -> dict[str, list[dict[str, Any]]]:
    """All objects of a running job."""
    status = {"phase": "Running", "observedGeneration": 1, "attempt": job.attempts.most - 1} | status
    status["restarts"] = {"total": job.restarts.most, "counted": job.counted.most}
    status["members"] = [{"pod": pod, "uid": pod} for pod in job.pods]
    labels = {JOB: job.name, UID: job.uid, ATTEMPT: str(status["attempt"]), MANAGED: "grpo-operator"}

    def made(name: str, **rest: Any) -> dict[str, Any]:
        return {"metadata": {"name": name, "uid": name, "labels": labels}, **rest}

    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {
        "GRPOJob": [{"metadata": {"name": job.name, "uid": job.uid, "generation": 1}, "status": status}],
        "Pod": [made(pod, status=ready) for pod in sorted(job.pods)],
        "StatefulSet": [made(f"{job.name}-{group}", spec={"replicas": n}) for group, n in job.groups.items()],
        "Service": [made(job.name, spec={"publishNotReadyAddresses": True})],
        "NetworkPolicy": [made(job.name), *([made(f"{job.name}.engines")] if job.has_engines else [])],
        "ConfigMap": [made(f"{job.name}-{status['attempt']}")],
    }


def test_a_failure_of_a_job_at_rest_has_one_result() -> None:
    once = at_rest().hit(FAILURE, at_rest=True)
    assert (once.phases, once.restarts, once.counted) == ({"Running"}, Count(0, 1, 1), Count(0, 1, 1))
    spent = at_rest(counted=1).hit(FAILURE, at_rest=True)
    assert (spent.phases, spent.restarts, spent.attempts) == ({"Failed"}, Count(1, 1, 2), Count(2, 2, 3))
    moved = at_rest(counted=1).hit(EVICTION, at_rest=True)
    assert moved.phases == {"Running", "Failed"}
    engine = at_rest().hit(Blow(engine=True), at_rest=True)
    assert (engine.restarts.least, engine.attempts) == (1, Count(1, 1, 1))


def test_what_comes_before_a_job_is_at_rest_may_hide_what_was_before() -> None:
    twice = at_rest().hit(FAILURE, at_rest=True).hit(FAILURE, at_rest=False)
    assert (twice.phases, twice.counted) == ({"Running", "Failed"}, Count(0, 0, 1))
    hidden = at_rest(counted=1).hit(FAILURE, at_rest=True).edited(at_rest=False, suspend=True)
    assert (hidden.phases, hidden.counted.least) == ({"Suspended", "Failed"}, 1)
    again = at_rest().edited(at_rest=True, suspend=True).edited(at_rest=False, suspend=False)
    assert (again.phases, again.attempts) == ({"Running"}, Count(1, 1, 2))
    assert at_rest().finished().edited(at_rest=False, suspend=True).phases == {"Succeeded"}


def test_a_job_as_expected_has_no_difference() -> None:
    job = at_rest()
    assert differences(job, world(job), NOW) == []
    assert leftovers({"job-0": job}, world(job)) == []
    brief = replace(job, spec=job.spec | {"ttlSecondsAfterFinished": 0}).finished()
    assert differences(brief, {kind: [] for kind in ("GRPOJob", *KINDS)}, NOW) == []


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda seen: seen["GRPOJob"].clear(), "the job is gone"),
        (lambda seen: seen["GRPOJob"][0]["metadata"].update(generation=2), "older generation"),
        (lambda seen: seen["GRPOJob"][0]["status"].update(phase="Starting"), "phase Starting, not Running"),
        (lambda seen: seen["GRPOJob"][0]["status"].update(restarts={"total": 1}), "1 restarts, not 0 to 0"),
        (lambda seen: seen["GRPOJob"][0]["status"]["members"].pop(), "is not the recorded one"),
        (lambda seen: seen["Pod"].pop(), r"Pods \['job-0-a-0'\], not"),
        (lambda seen: seen["Pod"][0]["metadata"].update(deletionTimestamp="now"), "not a ready one of attempt 0"),
        (lambda seen: seen["StatefulSet"][0]["spec"].update(replicas=2), "StatefulSet job-0-a is not the attempt's"),
        (lambda seen: seen["Service"][0]["spec"].clear(), "the Service is not as applied"),
        (lambda seen: seen["NetworkPolicy"].clear(), r"NetworkPolicys \[\]"),
    ],
)
def test_every_difference_is_noticed(change: Any, noticed: str) -> None:
    job = at_rest()
    seen = world(job)
    change(seen)
    with pytest.raises(AssertionError, match=noticed):
        assert not differences(job, seen, NOW), "; ".join(differences(job, seen, NOW))


def test_a_suspended_job_has_no_pods_and_a_deleted_one_nothing() -> None:
    job = at_rest().edited(at_rest=True, suspend=True)
    seen = world(at_rest(), phase="Suspended")
    found = differences(job, seen, NOW)
    assert [one.split(":")[0] for one in found] == [
        "it is still being suspended",
        "pods are left",
        "StatefulSet job-0-a wants pods",
        "StatefulSet job-0-b wants pods",
    ]
    assert len(leftovers({}, seen)) == 8


def test_a_deadline_ends_a_job_and_must() -> None:
    job = at_rest(activeDeadlineSeconds=10)
    late = world(job, activeSeconds=0, activeSince="2025-12-31T23:59:00Z")
    assert differences(job, late, NOW) == ["active for longer than its deadline of 10 s"]


def test_the_same_seed_chooses_the_same_and_only_what_is_possible() -> None:
    jobs = {"job-0": None, "job-1": at_rest(), "job-2": at_rest("Suspended", suspend=True), "job-3": at_rest("Failed")}
    choices = [[choose(Random(seed), jobs, frozenset(jobs)) for seed in range(300)] for _ in range(2)]
    assert choices[0] == choices[1]
    assert {what for what, name in choices[0] if name == "job-3"} == {"annotate", "delete", "recreate"}
    assert {what for what, name in choices[0] if name == "job-2"} >= {"resume", "reshape"}
    assert "finish" not in possible(jobs["job-1"], at_rest=False)
    for seed in range(50):
        parse_spec(make_job("job-0", **new_spec(Random(seed)))["spec"])


def sample(**changes: Any) -> Sample:
    usual = {"pid": 1, "descriptors": 20, "connections": 8, "watches": 6, "threads": 6, "rss": 95.0}
    return Sample(**usual | {"series": 330, "ghosts": 0, "objects": 250} | changes)


def test_one_descriptor_leaked_at_each_restart_of_the_api_server_is_found() -> None:
    noisy = [sample(descriptors=20 + number % 2, rss=95 + number % 5) for number in range(24)]
    assert leaks(noisy) == []
    assert leaks([replace(one, descriptors=20 + number) for number, one in enumerate(noisy)]) == [
        "descriptors grew from 27 to 36"
    ]
    assert leaks([sample(pid=2, rss=400.0), *noisy]) == []


def test_objects_in_etcd_are_of_a_job_or_are_counted() -> None:
    keys = ["/registry/pods/soak/job-1-a-0", "/registry/leases/x/y", "/registry/pods/soak/job-10-a-0"]
    assert objects_of_no_job(keys, ["job-1"]) == ["/registry/pods/soak/job-10-a-0"]


def test_errors_that_no_fault_explains_are_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[time] the pass failed\nTraceback (most recent call last):\n  File x\nConnectionResetError: [Errno 104]\n"
        "Traceback (most recent call last):\n  File y\n    z\nKeyError: 'uid'\nTask exception was never retrieved\n"
        "Traceback (most recent call last):\n  File x\nasyncio.exceptions.CancelledError\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  File x\nTimeoutError\n"
    )
    assert odd_errors(log) == ["KeyError: 'uid'", "Task exception was never retrieved"]
