"""Passes over jobs to which nothing happens: the more there are, the rarer they are, and each deadline is kept."""

import pytest

from grpo_operator.decide.next_pass import CALM_SECONDS
from grpo_operator.runtime import rate_limits
from support.control_plane.simulation import Simulation

JOBS = [f"job-{number}" for number in range(10)]


def test_many_jobs_that_wait_for_their_pods_share_the_looks_and_slow_down_none_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limits, "LOOKS_PER_SECOND", 0.5)
    world = Simulation(startupDeadlineSeconds=300)
    world.create("a")
    world.go_on(5)
    assert world.status("a").phase == "Running"
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
