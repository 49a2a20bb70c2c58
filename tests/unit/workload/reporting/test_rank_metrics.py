"""The record of one rank's step, and the metrics that compare all ranks."""

import json
from dataclasses import replace

import pytest

from grpo_workload.reporting.rank_metrics import DeviceUse, RankStep, summarise_ranks

PHASES = {"prompts": 0.5, "generate": 4.0, "reward": 1.0, "journal": 0.5, "gather": 3.0, "train": 2.0, "sync": 0.25}


def rank_step(rank: int, *, device: DeviceUse | None = None, trained: int = 900, **seconds: float) -> RankStep:
    return RankStep(
        rank=rank,
        seconds=PHASES | seconds,
        generated_tokens=600,
        sample_tokens=1000,
        longest_sample_tokens=250,
        trained_tokens=trained,
        fed_tokens=1200,
        device=device or DeviceUse(),
    )


def test_the_record_of_a_rank() -> None:
    use = DeviceUse(gpu_utilization=87.123456, memory_used_peak=80 * 2**30)
    assert json.loads(json.dumps(rank_step(3, device=use).as_json())) == {
        "rank": 3,
        "generated_tokens": 600,
        "sample_tokens": 1000,
        "trained_tokens": 900,
        "fed_tokens": 1200,
        "generated_tokens_per_second": 150.0,
        "trained_tokens_per_second": 450.0,
        "padding_fraction": 0.25,
        "longest_sample_share": 0.25,
        "gpu_utilization": 87.1235,
        "memory_used_peak": 80 * 2**30,
        "seconds": PHASES,
    }


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    # Neither waiting for others nor what all ranks do together counts as a rank's own work.
    ranks = [rank_step(0, gather=6.0, train=90.0), rank_step(1, generate=10.0, gather=0.0), rank_step(2)]
    metrics = summarise_ranks(ranks)
    assert (metrics["ranks/slowest"], metrics["ranks/slowest_seconds"]) == (1.0, 12.0)
    assert metrics["ranks/imbalance"] == pytest.approx(12.0 / 8.0)
    assert (metrics["ranks/generate_seconds/min"], metrics["ranks/generate_seconds/max"]) == (4.0, 10.0)
    name = "ranks/trained_tokens_per_second"
    assert (metrics[f"{name}/min"], metrics[f"{name}/max"]) == (10.0, 450.0)


def test_padding_is_a_share_of_all_tokens_and_no_mean_of_ranks() -> None:
    assert summarise_ranks([rank_step(0, trained=1200), rank_step(1, trained=600)])["padding_fraction"] == 0.25


def test_a_value_is_reported_if_any_rank_knows_it() -> None:
    metrics = summarise_ranks([rank_step(0), rank_step(1, device=DeviceUse(memory_used_peak=7))])
    assert (metrics["ranks/memory_used_peak/min"], metrics["ranks/memory_used_peak/max"]) == (7.0, 7.0)
    assert not [name for name in metrics if "gpu_utilization" in name]


def test_engines_idle_at_most_as_long_as_any_rank_asked_nothing_of_them() -> None:
    metrics = summarise_ranks([replace(rank_step(rank), engines_idle_seconds=2.0 - rank) for rank in range(2)])
    assert (metrics["ranks/engines_idle_seconds/min"], metrics["ranks/engines_idle_seconds/max"]) == (1.0, 2.0)
    assert replace(rank_step(0), engines_idle_seconds=0.5).as_json()["engines_idle_seconds"] == 0.5
    assert "ranks/engines_idle_seconds/min" not in summarise_ranks([rank_step(0)])


def test_a_rank_without_work_has_zeros() -> None:
    counts = ("generated_tokens", "sample_tokens", "longest_sample_tokens", "trained_tokens", "fed_tokens")
    metrics = summarise_ranks([RankStep(rank=0, seconds={"generate": 0.0, "train": 0.0}, **dict.fromkeys(counts, 0))])
    assert (metrics["padding_fraction"], metrics["ranks/longest_sample_share/max"]) == (0.0, 0.0)
    assert metrics["ranks/imbalance"] == 1.0


def test_answers_that_were_not_compared_in_time_are_counted_over_all_ranks() -> None:
    ranks = [replace(rank_step(rank), timeouts={"right": count}) for rank, count in enumerate((2, 0, 1))]
    assert summarise_ranks(ranks)["rewards/right/timeouts"] == 3.0
    assert not any(name.startswith("rewards/") for name in summarise_ranks([rank_step(0)]))


def test_what_rewards_logged_is_averaged_over_the_values_of_all_ranks() -> None:
    logged = [{"rewards/judge/tokens": [4.0, 1.0]}, {}, {"rewards/judge/tokens": [10.0], "rewards/judge/cost": [0.5]}]
    metrics = summarise_ranks([replace(rank_step(rank), logged=values) for rank, values in enumerate(logged)])
    assert (metrics["rewards/judge/tokens"], metrics["rewards/judge/cost"]) == (5.0, 0.5)
