import json
import math

import pytest

from grpo_workload.metrics import MetricsLog, summarise
from grpo_workload.rewards import RewardTable


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_step_that_can_be_read_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(0, {"loss": 0.5, "kl": math.nan})
    assert read(path) == [{"step": 0, "loss": 0.5, "kl": None}]
    log.write(1, {"loss": 0.25})
    assert read(path)[1] == {"step": 1, "loss": 0.25}
    log.close()


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(5):
        log.write(step, {"loss": float(step)})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')

    resumed = MetricsLog(path, resume_step=3)
    assert [line["step"] for line in read(path)] == [0, 1, 2]
    resumed.write(3, {"loss": 33.0})
    resumed.close()
    assert [line["loss"] for line in read(path)] == [0.0, 1.0, 2.0, 33.0]


def test_summary():
    metrics = summarise(
        RewardTable(names=["a", "b"], values=[[1.0, 0.0, 1.0, 1.0], [None, None, 2.0, None]], totals=[1.0, 0.0, 2.0, 2.0]),
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
        "rewards/b/mean": 2.0,
        "rewards/b/std": pytest.approx(math.nan, nan_ok=True),
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
