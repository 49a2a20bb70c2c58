"""Two operators at the same job, one of them suspended at the worst moment, or with a mirror that is far behind.

The log has a line for each pass.
"""

import logging
from typing import Any

import pytest

from grpo_operator.api import names
from grpo_operator.decide.conditions import find
from grpo_operator.decide.in_place import LATE_SECONDS
from grpo_operator.runtime.errors import EarlyError
from grpo_spec.reports import ExitCode
from support.control_plane.memory_api import Request
from support.control_plane.simulated_operator import PassApi
from support.control_plane.simulation import Simulation

POLICY = {"maxRestarts": 3, "backoffSeconds": 2, "maxBackoffSeconds": 4}
IN_PLACE = POLICY | {"restartStrategy": "InPlace"}
SERVER = {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 1, "gpus": 1}]}}


def running(**spec: object) -> Simulation:
    return Simulation.running(**{"failurePolicy": POLICY} | spec)


def suspend_before(world: Simulation, which: int, verb: str, kind: str, seconds: int = 30) -> None:
    """Let an operator go on until it is about to send a request, while time passes."""
    api: PassApi = world.operators[which].api
    api.held = True
    for _ in range(seconds * 20):
        sent = {id(one) for one_pass in api.passes for one in one_pass.requests}
        wanted = [r for r, _ in api.waiting if (r.verb, r.kind) == (verb, kind) and id(r) not in sent]
        if wanted:
            return
        api.proceed(0)
        world.wait(0.05)
    raise AssertionError(f"{verb} {kind} is not sent")


def fail_a_pod(world: Simulation) -> None:
    pod = world.cluster.pods(job="a")[0]
    world.truth.harm(pod)
    world.cluster.end_container(pod, ExitCode.RANK_FAILED, "RankFailed")


def test_an_answer_that_comes_after_the_job_was_deleted_does_not_bring_it_back() -> None:
    world = running()
    world.suspend_or_resume("a")
    world.wait(3.0)
    first, second = world.operators
    first.api.held = second.api.held = True
    world.go_on(2)  # no pod is left, which is about to be written
    suspend_before(world, 0, "update", names.KIND)
    first.api.proceed(0)  # it is written, and not answered yet
    world.wait()
    world.delete("a")
    world.wait()
    first.api.release()
    second.api.release()
    world.go_on(60, garbage=True)
    assert [operator.program.mirror.count()[names.KIND] for operator in world.operators] == [0, 0]


def test_an_operator_that_was_suspended_between_two_reads_deletes_no_pod_of_the_next_attempt() -> None:
    world = running()
    fail_a_pod(world)
    while world.cluster.pods(job="a"):
        world.go_on(1)
    first, second = world.operators
    second.api.held = True
    suspend_before(world, 0, "list", "Pod")
    second.api.release()
    world.go_on(20)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Running")
    first.api.release()
    world.go_on(20)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Running")
    assert world.truth.outdated == set()


def test_an_operator_that_does_not_see_the_first_attempt_begin_deletes_none_of_its_pods() -> None:
    """Both wait for an earlier job's objects, and the one that is behind has just said so."""
    world = running()
    world.delete("a")
    world.create("a")
    world.wait(3.0)
    first, second = world.operators
    first.api.held_kinds |= {names.KIND, "Service"}
    second.api.held = True
    world.cluster.collect_garbage()
    world.cluster.collect_garbage()  # the pods of the StatefulSets that are gone
    world.cluster.step()
    world.wait(0.3)
    second.api.release()
    world.wait(0.1)
    assert world.status("a").attempt == 0
    for _ in range(10):
        world.cluster.step()
        world.wait(0.1)
    assert world.truth.outdated == set()


def test_an_operator_that_does_not_see_that_a_job_was_replaced_deletes_nothing_of_the_new_one() -> None:
    """To it, what belongs to the new job was left behind by another."""
    world = Simulation(failurePolicy=POLICY, suspend=True)
    world.create("a")
    world.go_on(3)
    world.operators[0].api.held_kinds.add(names.KIND)
    world.delete("a")
    world.spec["suspend"] = False
    world.create("a")
    world.go_on(30)
    assert (world.status("a").attempt, world.status("a").phase) == (0, "Running")


def test_an_operator_that_has_not_seen_the_pods_of_an_earlier_job_does_not_begin_beside_them() -> None:
    world = Simulation(failurePolicy=POLICY)
    first, second = world.operators
    first.api.held_kinds.add("Pod")
    second.api.held = True
    world.create("a")
    world.go_on(5)
    world.delete("a")
    world.create("a")
    world.wait(5.0)
    world.cluster.collect_garbage()  # the StatefulSets are gone, their pods still end
    world.wait(5.0)
    assert world.cluster.pods(job="a")
    assert world.status("a").attempt is None
    first.api.held_kinds.clear()
    world.go_on(20, garbage=True)
    assert (world.status("a").attempt, world.status("a").phase) == (0, "Running")


def test_how_far_pods_have_come_is_written_only_where_a_start_takes_long() -> None:
    world = Simulation()
    world.operators[1].api.held = True
    world.create("a")
    world.wait(1.0)
    begun = world.status("a")
    world.cluster.run_statefulsets()
    world.wait(3.0)
    assert world.status("a") == begun
    world.wait(3.0)
    assert (world.status("a").phase, len(world.status("a").members)) == ("Pending", len(world.cluster.pods(job="a")))
    world.go_on(3)
    assert world.status("a").phase == "Running"


def test_pods_are_listed_before_a_further_attempt_and_not_before_the_first() -> None:
    """For each list the API server looks at all pods of the namespace; before its first attempt a job has none."""

    def lists() -> int:
        sent = [one for operator in world.operators for one_pass in operator.api.passes for one in one_pass.requests]
        return [(one.verb, one.kind) for one in sent].count(("list", "Pod"))

    world = running()
    assert lists() == 0
    world.fail("a")
    world.go_on(8)
    assert (world.status("a").attempt, world.status("a").phase, lists() > 0) == (1, "Running", True)


def test_attempts_begin_in_the_same_pods_one_after_another_and_once_in_new_ones() -> None:
    world = running(failurePolicy=IN_PLACE, generation=SERVER)
    first = [pod["metadata"]["uid"] for pod in world.cluster.pods()]
    for attempt in (1, 2):
        world.fail("a")
        world.go_on(8)
        status = world.status("a")
        assert (status.attempt, status.pods_attempt, status.phase) == (attempt, 0, "Running")
        assert [pod["metadata"]["uid"] for pod in world.cluster.pods()] == first

    world.fail("a")
    world.truth.harm(world.cluster.pods()[0])
    world.cluster.delete_pod(world.cluster.pods()[0])
    world.go_on(12)

    status = world.status("a")
    assert (status.attempt, status.pods_attempt, status.phase) == (3, None, "Running")
    assert not {pod["metadata"]["uid"] for pod in world.cluster.pods()} & {*first}
    world.end()


def test_a_restart_in_place_is_finished_by_an_operator_that_begins_in_the_middle_of_it() -> None:
    """The status is written, the contract is not; then the contract is, and no pod is told."""
    for requests in range(1, 12):
        world = running(failurePolicy=IN_PLACE)
        first = [pod["metadata"]["uid"] for pod in world.cluster.pods()]
        world.replace_operator(1)
        world.operators[1].api.held = True
        world.operators[0].api.held = True
        world.fail("a")
        for _ in range(requests):
            world.operators[0].api.proceed(0, None)
            world.go_on(1)
        for which in (0, 1):
            world.replace_operator(which)
        world.go_on(20)
        status = world.status("a")
        assert (status.attempt, status.pods_attempt, status.phase) == (1, 0, "Running"), requests
        assert [pod["metadata"]["uid"] for pod in world.cluster.pods()] == first
        world.end()


def test_a_restart_in_place_waits_for_what_a_killed_launcher_says_once_it_is_started_again() -> None:
    """And for ranks that nobody ends, as long as it must: then all pods are recreated."""
    world = running(failurePolicy=IN_PLACE, generation=SERVER)
    first = [pod["metadata"]["uid"] for pod in world.cluster.pods()]
    world.fail("a")
    for pod in world.cluster.pods(job="a")[:2]:
        world.cluster.end_container(pod, 137, "OOMKilled")
    world.go_on(12)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Running")
    assert [pod["metadata"]["uid"] for pod in world.cluster.pods()] == first

    fail_a_pod(world)  # and no other rank loses it
    world.go_on(LATE_SECONDS - 10, garbage=True)
    assert (world.status("a").attempt, world.status("a").phase) == (1, "Restarting")
    world.go_on(60, garbage=True)
    assert (world.status("a").attempt, world.status("a").phase) == (2, "Running")
    assert not {pod["metadata"]["uid"] for pod in world.cluster.pods()} & {*first}


def test_a_rank_that_alone_fails_in_pods_that_are_kept_keeps_no_job_from_running_in_the_end() -> None:
    world = running(failurePolicy=IN_PLACE, generation=SERVER)
    fail_a_pod(world)
    world.end()


def test_a_line_for_each_pass_says_what_it_saw_and_decided_and_when_it_looks_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, logger="grpo_operator.passes"):
        world = running()
        fail_a_pod(world)
        world.go_on(3)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".pass_log")]
    assert len(lines) == sum(len(operator.api.passes) for operator in world.operators)
    said = [dict(word.split("=", 1) for word in line.split(" ")[1:]) for line in lines if "conflict=" not in line]
    assert len(said) < len(lines), "one of two operators finds that the other has written"
    begins = {"job": "ns/a", "phase": "Pending", "attempt": "none", "ready": "0/2", "obstacle": "none", "mode": "run"}
    assert said[0].items() >= (begins | {"stops": "0", "deletions": "0", "written": "true"}).items()
    assert int(said[0]["applies"]) > 2
    assert float(said[0]["next"]) > 0
    stopped = [line for line in said if line["mode"] == "stopped"]
    assert next(line["stops"] for line in stopped if line["written"] == "true") == "2"
    assert {(line["phase"], line["attempt"]) for line in stopped} >= {("Running", "0"), ("Restarting", "0")}


def test_what_an_older_crd_drops_is_written_once_and_known_as_long_as_the_operator_lives() -> None:
    """A CRD from before spare engines had a back-off of their own; the engine waits nevertheless."""
    policy = POLICY | {"maxRestarts": 0, "onGenerationFailure": "RestartGeneration", "backoffSeconds": 60}
    server = SERVER["server"] | {"elastic": {"replicas": 2, "maxReplicas": 3}}
    world = running(failurePolicy=policy | {"maxBackoffSeconds": 600}, generation=SERVER | {"server": server})
    world._run(world.operators.pop().stop())
    api = world.operators[0].api
    update = api._update

    def drop_and_update(request: Request) -> dict[str, Any]:
        body = request.params["body"]
        members = [
            {name: value for name, value in member.items() if name not in ("replaceTime", "failures")}
            for member in body["status"]["members"]
        ]
        body["status"] = body["status"] | {"members": members}
        return update(request)

    api._update = drop_and_update  # type: ignore[method-assign]

    def writes() -> int:
        return sum(request.verb == "update" for made in api.passes for request in made.requests)

    spare = world.cluster.pods(job="a")[-1]
    world.cluster.end_container(spare, ExitCode.RANK_FAILED, "EngineDied")
    world.go_on(5)
    before = writes()
    world.go_on(25)
    assert writes() - before <= 1, "nothing happens, so nothing is written"
    assert spare["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in world.cluster.pods(job="a")}, "it waits"
    assert all("replaceTime" not in member for member in world.cluster.job("a")["status"]["members"])
    world.go_on(90)
    assert spare["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in world.cluster.pods(job="a")}


def test_a_job_says_that_the_api_server_does_not_know_its_kind_yet_and_begins_once_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each operator's log has one line about it, without a traceback."""
    world = Simulation(failurePolicy=POLICY)
    is_early = True

    def refuse(api: PassApi) -> None:
        passes_on = api.before

        async def before(request: Request) -> None:
            await passes_on(request)
            if is_early and request.verb in ("dry-create", "create") and request.kind != "Event":
                raise EarlyError

        api.before = before  # type: ignore[method-assign]

    for operator in world.operators:
        refuse(operator.api)
    world.create("a")
    world.go_on(20)
    blocked = find(world.status("a"), names.Condition.BLOCKED)
    assert (blocked.status, blocked.reason) == ("True", "ClusterNotReady")
    assert blocked.message.endswith("there is nothing to do")
    assert sum("the pass failed" in message for message in caplog.messages) <= len(world.operators)
    assert not any(record.exc_info for record in caplog.records)
    is_early = False
    world.go_on(5)
    status = world.status("a")
    blocked = find(status, names.Condition.BLOCKED)
    assert (status.phase, status.attempt, status.restarts.total) == ("Running", 0, 0)
    assert (blocked and blocked.status, blocked and blocked.reason) == ("False", "Recovered")
