"""Passes over jobs to which nothing happens: the more there are, the rarer they are, and each deadline is kept."""

import logging

import pytest

from grpo_operator.decide.next_pass import CALM_SECONDS
from grpo_operator.decide.second_look import News
from grpo_operator.runtime import rate_limits
from support.control_plane.simulation import Simulation

JOBS = [f"job-{number}" for number in range(10)]


def test_many_jobs_that_wait_for_their_pods_share_the_looks_and_slow_down_none_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limits, "LOOKS_PER_SECOND", 0.5)
    world = Simulation.running(startupDeadlineSeconds=300)
    for name in JOBS:
        world.create(name)
    world.wait(60.0)
    passes = [operator.api.passes for operator in world.operators]
    before = [len(made) for made in passes]
    world.wait(200.0)
    looks = 200 * 0.5 + 200 / CALM_SECONDS  # at those that wait, and at the one that runs
    assert [len(made) - old for made, old in zip(passes, before, strict=True)] == [pytest.approx(looks, abs=8)] * 2
    world.wait(37.0)
    assert {world.status(name).phase for name in JOBS} == {"Pending"}
    world.wait(5.0)  # and not only when a look is due
    assert {world.status(name).phase for name in JOBS} == {"Failed"}

    for name in JOBS:
        world.delete(name)
    world.create("other")
    world.wait(10.0)
    made = world.operators[0].api.passes
    old = len(made)
    world.wait(20.0)
    assert len(made) - old >= 9, "jobs that are gone slow down nobody"


def test_a_look_at_a_job_to_which_nothing_happens_plans_nothing_and_what_happens_is_acted_on_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Simulation(activeDeadlineSeconds=1800, failurePolicy={"maxRestarts": 0})
    world.create("a")
    world.create("b")
    world.go_on(5)
    caplog.set_level(logging.DEBUG, "grpo_operator")
    caplog.clear()
    for number in range(120):
        for raw in [*world.cluster.store.objects.values()]:
            if raw["kind"] in ("Pod", "StatefulSet"):  # as their controllers do, and kubelets
                world.cluster.store.edit(raw, status={"said": number})
        world.wait(10.0)
    looks = [message for message in caplog.messages if message.startswith("pass job=ns/a ")]
    quiet = [message for message in looks if " quiet " in message]
    assert len(looks) > 2 * 1200 / CALM_SECONDS * 0.9, "both operators look as often as before"
    assert len(looks) - len(quiet) <= 2 * 10
    world.fail("b")
    world.wait(2.0)
    assert world.status("b").phase == "Failed"
    world.wait(590.0)
    assert world.status("a").phase == "Running"
    world.wait(15.0)
    assert world.status("a").phase == "Failed", "a deadline is kept"


def test_a_job_whose_details_wait_for_their_turn_is_planned_no_more_often_than_a_quiet_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where thousands start, most wait for minutes until they may say that their pods exist."""
    monkeypatch.setitem(rate_limits.RATES, News.DETAILS, rate_limits.Rate(5.0, 0.02))
    world = Simulation()
    for name in JOBS:
        world.create(name)
    world.wait(3.0)
    world.cluster.run_statefulsets()
    world.wait(3.0)
    caplog.set_level(logging.DEBUG, "grpo_operator")
    world.wait(300.0)
    passes = [message for message in caplog.messages if message.startswith("pass job=")]
    whole = [message for message in passes if " quiet " not in message]
    assert len(passes) > 2 * len(JOBS) * 300 / 2.5, "both operators look as often as at others that wait"
    assert len(whole) <= 2 * len(JOBS) * 12
    said = [name for name in JOBS if world.status(name).members]
    assert 4 <= len(said) <= 8, "those whose turn has come have said it"
