"""The metrics of a step from the rewards and lengths of all ranks."""

import math

import pytest

from grpo_workload.rewards.table import RewardTable
from grpo_workload.training.step_metrics import summarise


def test_each_metric_of_a_small_step():
    metrics = summarise(
        RewardTable(
            names=["a", "b"],
            values=[[1.0, 0.0, 1.0, 1.0], [None, None, 2.0, None]],
            totals=[1.0, 0.0, 2.0, 2.0],
            overflows=[None, None, None, "b"],
        ),
        num_generations=2,
        scale_rewards="group",
        prompt_lengths=[3, 3, 4, 4],
        completion_lengths=[5, 9, 6, 4],
        truncated=[False, True, False, False],
        step_time=2.0,
        num_tokens_before=100,
    )
    assert metrics == {
        "reward": 1.25,
        "reward_std": pytest.approx(math.sqrt(2.75 / 3)),
        "frac_reward_zero_std": 0.5,
        "rewards/a/mean": 0.75,
        "rewards/a/std": 0.5,
        "rewards/a/unscored": 0.0,
        "rewards/b/mean": 2.0,
        "rewards/b/std": pytest.approx(math.nan, nan_ok=True),
        "rewards/b/unscored": 0.75,
        "rewards/b/not_finite_ratio": 0.25,
        "completions/mean_length": 6.0,
        "completions/min_length": 4,
        "completions/max_length": 9,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 5.0,
        "completions/min_terminated_length": 4,
        "completions/max_terminated_length": 6,
        "num_tokens": 138,
        "step_time": 2.0,
        "tokens_per_second": 12.0,
    }
