"""Metrics of a step, and of an evaluation, under TRL's names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_workload.algorithm.advantage import ScaleRewards, as_groups, is_flat, mean, std
from grpo_workload.algorithm.best_of import best_at, pass_at
from grpo_workload.rewards.table import RewardTable


def summarise(
    table: RewardTable,
    *,
    num_generations: int,
    scale_rewards: ScaleRewards,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    truncated: Sequence[bool],
    step_time: float,
    num_tokens_before: int = 0,
) -> dict[str, float]:
    """Return the metrics of a step over all ranks: rewards, lengths, tokens, speed.

    Each list has one entry per completion of the whole step (gather them from the ranks first). `step_time` is in
    seconds. `num_tokens_before` is `num_tokens` of the previous step: prompts and completions since the run began.
    `tokens_per_second` counts completion tokens. The caller adds loss, grad_norm, learning_rate and `loss.token_means`.
    """
    num_tokens = sum(completion_lengths)
    return {
        **_reward_metrics(table, num_generations, scale_rewards),
        **_length_metrics(completion_lengths, truncated),
        "num_tokens": num_tokens_before + num_tokens + sum(prompt_lengths),
        "step_time": step_time,
        "tokens_per_second": num_tokens / step_time,
    }


def summarise_evaluation(
    table: RewardTable, *, num_generations: int, completion_lengths: Sequence[int], truncated: Sequence[bool]
) -> dict[str, float]:
    """Return the metrics of an evaluation over all ranks, as `summarise`; their names begin with `eval/`."""
    metrics = _mean_std(table.totals, "reward", "reward_std")
    for name, values in zip(table.names, table.values, strict=True):
        known = _known(values)
        metrics |= _mean_std(known, f"rewards/{name}/mean", f"rewards/{name}/std")
        metrics[f"rewards/{name}/unscored"] = values.count(None) / len(values)
        if num_generations > 1:
            metrics[f"rewards/{name}/best@{num_generations}"] = best_at(known, num_generations)
            passed = pass_at(known, num_generations)
            metrics |= {f"rewards/{name}/pass@{size}": share for size, share in passed.items()}
    lengths = _length_metrics(completion_lengths, truncated)
    metrics |= {"num_prompts": float(len(table.totals) // num_generations)}
    metrics |= {name: lengths[name] for name in ("completions/mean_length", "completions/clipped_ratio")}
    return {f"eval/{name}": value for name, value in metrics.items()}


def _reward_metrics(table: RewardTable, num_generations: int, scale_rewards: ScaleRewards) -> dict[str, float]:
    groups = as_groups(table.totals, len(table.totals) if scale_rewards == "batch" else num_generations)
    metrics = {**_mean_std(table.totals, "reward", "reward_std")}
    metrics["frac_reward_zero_std"] = sum(map(is_flat, groups)) / len(groups)
    for name, values in zip(table.names, table.values, strict=True):
        metrics |= _mean_std(_known(values), f"rewards/{name}/mean", f"rewards/{name}/std")
        metrics[f"rewards/{name}/unscored"] = values.count(None) / len(values)
        if overflows := table.overflows.count(name):
            metrics[f"rewards/{name}/not_finite_ratio"] = overflows / len(table.overflows)
    return metrics


def _known(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _mean_std(values: Sequence[float], mean_name: str, std_name: str) -> dict[str, float]:
    return {mean_name: mean(values), std_name: std(values)}


def _length_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    terminated = [length for length, is_cut in zip(lengths, truncated, strict=True) if not is_cut] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "completions/mean_terminated_length": sum(terminated) / len(terminated),
        "completions/min_terminated_length": min(terminated),
        "completions/max_terminated_length": max(terminated),
    }
