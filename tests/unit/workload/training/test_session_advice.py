"""Advice to raise sessions comes where waiting for them makes steps long, and for no other reason."""

import pytest

from grpo_workload.training.session_advice import SessionAdvisor
from support.trainer.places import config_of


def advise(*steps, together=1):
    """Return the advice after steps, each with seconds that episodes waited, of generating, and of the whole."""
    training = {"promptsPerStep": 4, "numGenerations": 8, "stepsPerGeneration": together}
    advisor, said = SessionAdvisor(config_of(training=training)), None
    for waited, generating, seconds in steps:
        said = advisor.add({"episodes/wait_seconds/mean": waited, "ranks/generate_seconds/max": generating}, seconds)
    return said


def test_steps_in_which_episodes_wait_long_say_what_to_raise():
    assert advise(*[(6.0, 12.0, 20.0)] * 5) == (
        "episodes wait 6.0 s of a step's 20.0 s for a session of an environment pod: raise "
        "spec.environmentPods.groups[].replicas, or sessions where pods have memory for more, while suspended (32 "
        "episodes of a step at once need as many)"
    )


@pytest.mark.parametrize(
    "steps",
    [
        [(6.0, 12.0, 20.0)] * 4,  # too few are known
        [(4.0, 12.0, 20.0)] * 5,  # it is a small part
        [(60.0, 1.0, 20.0)] * 5,  # of later steps, while ranks train
        [(300.0, 301.0, 310.0), *[(0.1, 12.0, 20.0)] * 4],  # a pod has begun again
    ],
)
def test_other_steps_say_nothing(steps):
    assert advise(*steps) is None


def test_steps_of_one_generation_are_looked_at_together():
    said = advise(*[(12.0, 12.0, 16.0), (12.0, 0.0, 4.0)] * 5, together=2)
    assert said.startswith("episodes wait 12.0 s of a generation's 20.0 s"), said
