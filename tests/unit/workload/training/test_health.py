"""Warnings of the last steps, and the end of a run that gives up: both depend on the metrics alone."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.policy.step.finite import NotFiniteError
from grpo_workload.training.health import FEWEST_KNOWN, WINDOW, Health, find_warnings, is_lost, left_out_warnings
from support.paths import ROOT
from support.trainer.reward_inputs import make_config

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
SAMPLED = {
    "trained/sampling/kl": 1e-4,
    "trained/sampling/ess": 0.9997,
    "trained/sampling/importance_sampling_ratio/masked_fraction": 0.02,
    "trained/sampling/importance_sampling_ratio/mean": 0.97,
}
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
            ["SamplingMismatch", "ZeroGradient"],
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"kl": 3.0}, "trainer and engine disagree: of trained/sampling, the median of kl is 3 nats a token"),
        ({"kl": math.inf}, "kl is inf"),
        ({"ess": 0.001}, "trainer and engine disagree: of trained/sampling, the median of ess is 0.001"),
        (
            {"importance_sampling_ratio/masked_fraction": 0.97},
            "importanceSamplingCorrection takes most of the loss away: of trained/sampling, the median of "
            "importance_sampling_ratio/masked_fraction is 0.97",
        ),
        ({"importance_sampling_ratio/mean": 0.09}, "takes most of the loss away: of trained/sampling, the median of "),
        ({"kl": 0.02, "ess": 0.96, "importance_sampling_ratio/masked_fraction": 0.1}, None),
        ({"kl": math.nan, "ess": math.nan}, None),
    ],
)
def test_trainer_and_engine_that_disagree_are_noticed_by_each_metric_and_soon(changes, said):
    bad = GOOD | SAMPLED | {f"trained/sampling/{name}": value for name, value in changes.items()}
    untrained = GOOD  # all advantages were 0
    for steps in ([bad] * WINDOW, [bad] * FEWEST_KNOWN, [bad] * 5 + [untrained] * 15):
        found = find_warnings(steps)
        assert [str(warning.reason) for warning in found] == ["SamplingMismatch"] * (said is not None)
        assert said is None or said in found[0].message
    assert find_warnings([bad] * (FEWEST_KNOWN - 1)) == ()


def test_a_mismatch_ends_its_warning_and_a_few_odd_steps_are_none():
    good, bad = GOOD | SAMPLED, GOOD | SAMPLED | {"trained/sampling/kl": 9.0, "trained/sampling/ess": 0.01}
    assert reasons([good] * 11 + [bad] * 9) == []
    assert reasons([good] * 9 + [bad] * 11) == ["SamplingMismatch"]
    assert reasons([bad] * 9 + [good] * 11) == []


def test_of_the_measured_jobs_the_one_whose_loss_vanished_is_named():
    """Steps of dense models, of FP8 and of stale samples: all are well but FP8 with `sequence_mask`."""
    results, jobs = ROOT / "benchmarks" / "results", {"quickstart": ROOT / "tests/support/run_folder/metrics.jsonl"}
    jobs = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in jobs.items()}
    for file in ("staleness_h100", "staleness_h200", "quantization_h100", "reward_staleness_h200"):
        for number, line in enumerate((results / f"{file}.jsonl").read_text().splitlines()):
            row = json.loads(line)
            steps = row.get("steps") or [{"trained/sampling/ess": ess} for ess in row.get("ess", []) if ess is not None]
            jobs[file, number, row.get("row"), row.get("quantization")] = steps
    found = {
        name: warning.message.rpartition(", ")[2]
        for name, steps in jobs.items()
        for end in range(len(steps) + 1)
        for warning in find_warnings([GOOD | step for step in steps[max(0, end - WINDOW) : end]])
        if warning.reason == "SamplingMismatch"
    }
    assert sum(len(steps) >= FEWEST_KNOWN for steps in jobs.values()) > 40
    assert found == {
        ("quantization_h100", 2, "colocate:equal:0", "fp8"): "the median of importance_sampling_ratio/mean is 0.023 "
        "(less than 0.5)"
    }


def test_a_reward_that_does_nothing_is_named():
    rewards = [
        make_config("tags", format={"tags": ["think"]}),
        make_config("right", exactMatch={}),
        make_config("length", softOverlong={"maxLength": 9, "cacheLength": 3}),
    ]
    dead = {"rewards/tags/mean": 0.0, "rewards/tags/std": 0.0, "rewards/right/mean": 0.5, "rewards/right/std": 0.5}
    dead |= {"rewards/length/mean": 0.0, "rewards/length/std": 0.0}
    (warning,) = find_warnings([GOOD | dead] * WINDOW, rewards)
    assert warning.reason == "DeadReward"
    assert "steps rewards[tags] gave 0: does" in warning.message
    both = find_warnings(
        [GOOD | ALIKE | dead | {"rewards/right/mean": 1.0, "rewards/right/std": 0.0}] * WINDOW, rewards
    )
    assert [str(one.reason) for one in both] == ["ConstantReward", "DeadReward"]
    assert find_warnings([GOOD | dead] * WINDOW, rewards[:1]) == (), "alone, it is noticed by the sum"
    once = [GOOD | dead] * (WINDOW - 1) + [GOOD | dead | {"rewards/tags/std": 0.2, "rewards/tags/mean": 0.1}]
    assert find_warnings(once, rewards) == ()


@pytest.mark.parametrize(
    ("settings", "value", "is_dead"),
    [
        ({"stopped": {}}, 1.0, False),
        ({"stopped": {}}, 0.0, True),
        ({"stopped": {}, "weight": 0.0}, 0.0, False),
        ({"stopped": {}, "weight": -1.0}, 0.0, False),
        ({"reasoningGym": {}}, 0.01, True),
        ({"softOverlong": {"maxLength": 9, "cacheLength": 3}}, -1.0, True),
        ({"function": "my:f"}, 0.0, False),
        ({"environment": {}}, 5.0, False),
        ({"environment": {}}, -0.5, True),
        ({"function": "my:f"}, 0.5, False),
        ({"function": "my:f"}, -0.5, True),
        ({"function": "my:f", "weight": -0.1}, 2.0, True),
        ({"stopped": {}}, math.nan, False),
    ],
)
def test_a_constant_reward_is_dead_only_if_it_could_be_better(settings, value, is_dead):
    steps = [GOOD | {"rewards/mine/mean": value, "rewards/mine/std": math.nan}] * WINDOW
    found = find_warnings(steps, [make_config(**settings), make_config("other", function="my:g")])
    assert [str(warning.reason) for warning in found] == ["DeadReward"] * is_dead


def test_a_reward_without_a_value_for_most_completions_is_named():
    rewards = [make_config("right", exactMatch={}), make_config("watched", function="my:f", weight=0.0)]
    none, most = (GOOD | {"rewards/right/unscored": share, "rewards/watched/unscored": 1.0} for share in (1.0, 0.2))
    (warning,) = find_warnings([none] * 10 + [most] * (WINDOW - 10), rewards)
    assert warning.reason == "CompletionsUnscored"
    assert "rewards[right] gave 60% no value" in warning.message
    assert find_warnings([none] * 7 + [most] * (WINDOW - 7), rewards) == ()


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
    optional={"loss_scale": st.sampled_from([1.0, 65536.0])}
    | dict.fromkeys(SAMPLED, st.sampled_from([0.0, 0.9, 2.0, math.nan, math.inf])),
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
    health.add(NAN)
    said = "2 steps in a row.*loss nan, grad_norm nan\\); training.maxSkippedSteps is 1"
    with pytest.raises(NotFiniteError, match=said):
        raise health.error()


def test_engines_that_are_left_out_are_one_warning_with_all_reasons():
    assert left_out_warnings([]) == ()
    (warning,) = left_out_warnings(["engine a hangs", "engine b is cut off"])
    assert (str(warning.reason), warning.message) == ("EngineLeftOut", "engine a hangs; engine b is cut off")
