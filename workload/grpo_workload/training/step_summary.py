"""The loop's summary of a step that has just ended: its metrics, and what this rank did in it."""

from __future__ import annotations

from grpo_workload.algorithm.step_plan import EpisodeFact
from grpo_workload.ranks.clock import Clock
from grpo_workload.reporting.rank_metrics import RankStep
from grpo_workload.training.rollout import Generation, Rollout
from grpo_workload.training.run import Run
from grpo_workload.training.step_metrics import summarise
from grpo_workload.training.work import Work


def summarise_step(run: Run, step: int, rollout: Rollout, num_tokens: int, clock: Clock) -> dict[str, float]:
    """Return the step's metrics under TRL's names, with the seconds that each phase took on this rank."""
    every = [fact for own in rollout.facts for fact in own]
    episodes = [fact.episode or EpisodeFact() for fact in every] if run.config.has_episodes else None
    metrics = summarise(
        rollout.table,
        num_generations=run.config.training.num_generations,
        scale_rewards=run.config.training.scale_rewards,
        prompt_lengths=[fact.prompt_tokens - (fact.episode.context_tokens if fact.episode else 0) for fact in every],
        completion_lengths=[fact.tokens for fact in every],
        truncated=[fact.is_truncated for fact in every],
        step_time=clock.seconds,
        num_tokens_before=num_tokens,
        episodes=episodes,
    )
    facts = [fact for fact in every if not fact.is_lost]
    count = max(1, len(facts))
    if step != rollout.step:  # its tokens were counted before
        metrics["num_tokens"] = num_tokens
    metrics["completions/not_finite_ratio"] = sum(not fact.has_logprobs for fact in facts) / count
    if run.config.training.max_staleness:
        metrics["staleness/mean"] = sum(fact.staleness for fact in facts) / count
        metrics["staleness/max"] = max((fact.staleness for fact in facts), default=0)
    metrics["max_tokens_per_micro_batch"] = run.config.training.micro_batch_tokens
    return metrics | rollout.metrics | {f"time/{name}": seconds for name, seconds in clock.laps.items()}


def describe_rank(run: Run, generation: Generation, step: int, work: Work, clock: Clock) -> RankStep:
    """Describe what this rank did in the step that has just ended."""
    is_first = step == generation.steps.start
    samples = work.rollout.samples if step == work.rollout.step else []
    there = [one for one in samples if not one.completion.is_lost]
    tokens = [count for one in there for count in one.completion.num_read(one.prompt)]
    return RankStep(
        rank=run.rank,
        seconds=dict(clock.laps),
        generated_tokens=generation.generated_tokens if is_first else 0,
        logged=generation.logged if is_first else {},
        timeouts=generation.timeouts if is_first else dict.fromkeys(generation.timeouts, 0),
        engines_idle_seconds=run.generator.idle_seconds(),
        sample_tokens=sum(tokens),
        longest_sample_tokens=max(tokens, default=0),
        trained_tokens=work.plan.trained_tokens(run.rank),
        fed_tokens=work.plan.fed_tokens(run.rank),
        device=run.monitor.end(),
    )
