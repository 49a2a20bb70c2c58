"""Which warnings the last steps give, when a run gives up, and that neither depends on anything but the metrics."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.policy.finite import NotFiniteError
from grpo_workload.training.health import WINDOW, Health, find_warnings, is_lost, left_out_warnings

GOOD = {
    "loss": 0.1,
    "grad_norm": 0.5,
    "skipped": 0.0,
    "reward": 0.5,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.1,
    "completions/max_length": 64,
    "completions/not_finite_ratio": 0.0,
}
NAN = GOOD | {"loss": math.nan, "grad_norm": math.nan, "skipped": 1.0}
ALIKE = {"frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0}


def reasons(steps):
    return [str(warning.reason) for warning in find_warnings(steps)]


@pytest.mark.parametrize(
    ("changes", "expected", "said"),
    [
        ({}, [], ""),
        (ALIKE, ["ConstantReward"], "got the reward 0.5"),
        (ALIKE | {"reward": math.nan, "frac_reward_zero_std": 0.0}, ["ConstantReward"], "returned None"),
        ({"completions/clipped_ratio": 1.0}, ["CompletionsCut"], "has 64 tokens"),
        ({"grad_norm": 0.0}, ["ZeroGradient"], "although rewards differ"),
        (
            {"grad_norm": 0.0, "trained/sampling/importance_sampling_ratio/masked_fraction": 1.0},
            ["ZeroGradient"],
            "importanceSamplingCorrection masks 100%",
        ),
        ({"completions/clipped_ratio": 1.0, "grad_norm": 0.0}, ["CompletionsCut", "ZeroGradient"], ""),
        ({"completions/not_finite_ratio": 0.1}, ["NotFinite"], "20 left completions out whose log-probabilities"),
        ({"rewards/length/not_finite_ratio": 0.1}, ["NotFinite"], "because rewards[length] is too large"),
        ({"loss": math.inf, "skipped": 1.0}, ["NotFinite"], "20 had no effect"),
    ],
)
def test_each_warning(changes, expected, said):
    warnings = find_warnings([GOOD | changes] * WINDOW)
    assert [str(warning.reason) for warning in warnings] == expected
    assert said in "; ".join(warning.message for warning in warnings)


def test_rewards_that_differ_between_prompts_alone_are_not_a_constant_reward():
    steps = [GOOD | ALIKE | {"reward": number % 2} for number in range(WINDOW)]
    assert reasons(steps) == ["NoRewardDifference"]


@given(bad=st.integers(0, WINDOW - 1))
def test_one_good_step_in_the_window_is_enough_to_say_nothing_of_learning(bad):
    steps = [GOOD | ALIKE | {"completions/clipped_ratio": 1.0}] * WINDOW
    steps[bad] = GOOD
    assert reasons(steps) == []
    assert reasons(steps[1:]) == []


step = st.fixed_dictionaries(
    {
        name: st.sampled_from([0.0, 0.5, 1.0, math.nan, math.inf])
        for name in ("loss", "grad_norm", "reward", "rewards/a/not_finite_ratio")
    }
    | {
        name: st.sampled_from([0.0, 0.5, 1.0])
        for name in ("frac_reward_zero_std", "completions/clipped_ratio", "completions/not_finite_ratio")
    }
    | {"skipped": st.sampled_from([0.0, 1.0]), "completions/max_length": st.integers(1, 9)},
    optional={"loss_scale": st.sampled_from([1.0, 65536.0])},
)


@given(steps=st.lists(step, min_size=1, max_size=3 * WINDOW), limit=st.integers(0, 5))
def test_a_run_gives_up_exactly_after_more_lost_steps_in_a_row_than_allowed(steps, limit):
    health, in_a_row = Health(limit), 0
    for number, metrics in enumerate(steps):
        warnings = health.add(metrics)
        assert warnings == find_warnings(steps[max(0, number + 1 - WINDOW) : number + 1])
        in_a_row = in_a_row + 1 if is_lost(metrics) else 0
        assert health.gives_up == (in_a_row > limit)
        assert not is_lost(metrics) or "NotFinite" in {warning.reason for warning in warnings}
    assert health.skipped_steps == sum(metrics["skipped"] for metrics in steps)


def test_steps_in_which_float16_looks_for_its_loss_scale_are_not_lost():
    overflow = GOOD | {"grad_norm": math.inf, "skipped": 1.0, "loss_scale": 65536.0}
    assert not is_lost(overflow)
    assert is_lost(overflow | {"loss_scale": 1.0})
    assert is_lost(overflow | {"loss": math.nan})


def test_the_error_names_the_setting_and_the_last_step():
    health = Health(1)
    health.add(NAN)
    assert not health.gives_up
    health.add(NAN)
    assert health.gives_up
    error = health.error()
    assert isinstance(error, NotFiniteError)
    assert "2 steps in a row" in str(error)
    assert "loss nan, grad_norm nan); training.maxSkippedSteps is 1" in str(error)


def test_engines_that_are_left_out_are_one_warning_with_all_reasons():
    assert left_out_warnings([]) == ()
    (warning,) = left_out_warnings(["engine a hangs", "engine b is cut off"])
    assert (str(warning.reason), warning.message) == ("EngineLeftOut", "engine a hangs; engine b is cut off")
