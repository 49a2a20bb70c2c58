"""The metrics of a step from the rewards and lengths of all ranks."""

import math

import pytest

from grpo_workload.algorithm.step_plan import EpisodeFact
from grpo_workload.rewards.table import RewardTable, tabulate
from grpo_workload.training.step_metrics import summarise, summarise_evaluation

STEP = {"num_generations": 2, "scale_rewards": "group", "prompt_lengths": [3, 3, 4, 4], "step_time": 2.0}


def test_each_metric_of_a_small_step():
    table = RewardTable(
        names=["a", "b"],
        values=[[1.0, 0.0, 1.0, 1.0], [None, None, 2.0, None]],
        totals=[1.0, 0.0, 2.0, 2.0],
        overflows=[None, None, None, "b"],
    )
    completions = {"completion_lengths": [5, 9, 6, 4], "truncated": [False, True, False, False]}
    metrics = summarise(table, num_tokens_before=100, **STEP, **completions)
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


LOST = EpisodeFact(lost="timeout", retries=2)
EPISODES = [
    EpisodeFact(turns=3, calls=2, failed_calls=1, call_seconds=1.5, wait_seconds=6.0, context_tokens=7),
    EpisodeFact(turns=2, calls=1, retries=1, call_seconds=0.5, sequences=4),
    LOST,
    EpisodeFact(),
]
METRICS = {
    "tools/call_frequency": 1.0,  # TRL's: calls of an episode
    "tools/failure_frequency": pytest.approx(1 / 3),
    "episodes/turns/mean": 2.0,
    "episodes/sequences/mean": 2.0,
    "episodes/call_seconds/mean": pytest.approx(2 / 3),
    "episodes/wait_seconds/mean": 2.0,
    "episodes/retries": 3,
    "episodes/lost": 1,
    "episodes/lost/timeout": 1,
}


def test_lost_episodes_are_counted_by_cause_and_are_in_no_other_metric():
    table = tabulate({"a": 1.0}, [[1.0, 0.0, None, None]])
    counts = {"completion_lengths": [5, 9, 0, 4], "truncated": [False, True, False, False]}
    metrics = summarise(table, episodes=EPISODES, **STEP, **counts)
    assert metrics.items() >= METRICS.items()
    assert metrics["completions/mean_length"] == 6.0
    assert metrics["completions/min_length"] == 4
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert metrics["rewards/a/unscored"] == pytest.approx(1 / 3)
    assert metrics["num_tokens"] == 18 + 10
    found = summarise_evaluation(table, num_generations=2, episodes=EPISODES, **counts)
    assert found.items() >= {f"eval/{name}": value for name, value in METRICS.items()}.items()
    assert found["eval/completions/mean_length"] == 6.0


def test_a_step_whose_episodes_are_all_lost_has_metrics():
    counts = {"prompt_lengths": [3, 3], "completion_lengths": [0, 0], "truncated": [False, False]}
    metrics = summarise(tabulate({"a": 1.0}, [[None, None]]), episodes=[LOST, LOST], **STEP | counts)
    assert math.isnan(metrics["reward"])
    assert (metrics["episodes/lost"], metrics["completions/mean_length"], metrics["rewards/a/unscored"]) == (2, 0, 0)
