"""Metrics of a step, and of an evaluation, under TRL's names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import compress

from grpo_workload.algorithm.advantage import ScaleRewards, as_groups, is_flat, mean, std
from grpo_workload.algorithm.best_of import best_at, pass_at
from grpo_workload.algorithm.step_plan import EpisodeFact
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
    episodes: Sequence[EpisodeFact] | None = None,
) -> dict[str, float]:
    """Return the metrics of a step over all ranks: rewards, lengths, tokens, speed.

    Each list has one entry per completion of the whole step (gather them from the ranks first). `step_time` is in
    seconds. `num_tokens_before` is `num_tokens` of the previous step: prompts and completions since the run began.
    `tokens_per_second` counts completion tokens. The caller adds loss, grad_norm, learning_rate and `loss.token_means`.
    `episodes` are given for a job with tools or environments: what they lost is in no other metric, and completion
    tokens are those that the model sampled.
    """
    num_tokens = sum(completion_lengths)
    is_there = _is_there(episodes, len(table.totals))
    return {
        **_reward_metrics(table, num_generations, scale_rewards, is_there),
        **_length_metrics(completion_lengths, truncated, is_there),
        **_episode_metrics(episodes),
        "num_tokens": num_tokens_before + num_tokens + sum(compress(prompt_lengths, is_there)),
        "step_time": step_time,
        "tokens_per_second": num_tokens / step_time,
    }


def summarise_evaluation(
    table: RewardTable,
    *,
    num_generations: int,
    completion_lengths: Sequence[int],
    truncated: Sequence[bool],
    episodes: Sequence[EpisodeFact] | None = None,
) -> dict[str, float]:
    """Return the metrics of an evaluation over all ranks, as `summarise`; their names begin with `eval/`."""
    is_there = _is_there(episodes, len(table.totals))
    metrics = _mean_std(table.totals, "reward", "reward_std")
    for name, values in zip(table.names, table.values, strict=True):
        known = _known(values)
        metrics |= _mean_std(known, f"rewards/{name}/mean", f"rewards/{name}/std")
        metrics[f"rewards/{name}/unscored"] = _unscored(values, is_there)
        if num_generations > 1:
            metrics[f"rewards/{name}/best@{num_generations}"] = best_at(known, num_generations)
            passed = pass_at(known, num_generations, is_there)
            metrics |= {f"rewards/{name}/pass@{size}": share for size, share in passed.items()}
    lengths = _length_metrics(completion_lengths, truncated, is_there)
    metrics |= {"num_prompts": float(len(table.totals) // num_generations)}
    metrics |= {name: lengths[name] for name in ("completions/mean_length", "completions/clipped_ratio")}
    metrics |= _episode_metrics(episodes)
    return {f"eval/{name}": value for name, value in metrics.items()}


def _reward_metrics(
    table: RewardTable, num_generations: int, scale_rewards: ScaleRewards, is_there: Sequence[bool]
) -> dict[str, float]:
    groups = as_groups(table.totals, len(table.totals) if scale_rewards == "batch" else num_generations)
    metrics = {**_mean_std(table.totals, "reward", "reward_std")}
    metrics["frac_reward_zero_std"] = sum(map(is_flat, groups)) / len(groups)
    for name, values in zip(table.names, table.values, strict=True):
        metrics |= _mean_std(_known(values), f"rewards/{name}/mean", f"rewards/{name}/std")
        metrics[f"rewards/{name}/unscored"] = _unscored(values, is_there)
        if overflows := table.overflows.count(name):
            metrics[f"rewards/{name}/not_finite_ratio"] = overflows / len(table.overflows)
    return metrics


def _known(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _mean_std(values: Sequence[float], mean_name: str, std_name: str) -> dict[str, float]:
    return {mean_name: mean(values), std_name: std(values)}


def _is_there(episodes: Sequence[EpisodeFact] | None, count: int) -> list[bool]:
    """Return which completions are none of lost episodes."""
    return [True] * count if episodes is None else [one.lost is None for one in episodes]


def _unscored(values: Sequence[float | None], is_there: Sequence[bool]) -> float:
    return [*compress(values, is_there)].count(None) / max(1, sum(is_there))


def _episode_metrics(episodes: Sequence[EpisodeFact] | None) -> dict[str, float]:
    """Return TRL's metrics of tools, and those of episodes; none for a job without."""
    if episodes is None:
        return {}
    there = [one for one in episodes if one.lost is None]
    calls, count = sum(one.calls for one in there), max(1, len(there))
    causes = Counter(one.lost for one in episodes if one.lost is not None)
    return {
        "tools/call_frequency": calls / count,
        "tools/failure_frequency": sum(one.failed_calls for one in there) / max(1, calls),
        "episodes/turns/mean": sum(one.turns for one in there) / count,
        "episodes/call_seconds/mean": sum(one.call_seconds for one in there) / count,
        "episodes/wait_seconds/mean": sum(one.wait_seconds for one in there) / count,
        "episodes/retries": sum(one.retries for one in episodes),
        "episodes/lost": causes.total(),
        **{f"episodes/lost/{cause}": number for cause, number in causes.items()},
    }


def _length_metrics(lengths: Sequence[int], truncated: Sequence[bool], is_there: Sequence[bool]) -> dict[str, float]:
    lengths, truncated = [*compress(lengths, is_there)] or [0], [*compress(truncated, is_there)] or [False]
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
