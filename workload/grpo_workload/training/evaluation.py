"""Evaluation: while a job trains, it tries problems that it does not train on (`spec.evaluation`).

Ranks share the problems, sample with the job's engines between two steps, and score with rewards. Problems and their
seeds are the same each time, in all attempts, and for any number of ranks. Random states and the training's prompts are
not touched, so a job trains on the same samples with an evaluation as without one.

evaluations.jsonl in the run's folder has every evaluation under the number of steps that were taken before. It says
which ones are due: one that was skipped because the job had to stop is made when it goes on, and none is made twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.advantage import mean
from grpo_workload.algorithm.samples import Completion, Episode, Prompt
from grpo_workload.algorithm.step_plan import EpisodeFact
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.images import ImagePrompts
from grpo_workload.data.origin import origin_of
from grpo_workload.data.overlong import prompt_limit
from grpo_workload.data.shard import shard
from grpo_workload.data.tool_schemas import ToolSchemas
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.ranks.seeds import step_seed
from grpo_workload.rewards.scoring import Reward, begin_scoring, build_rewards, score, take_logged, take_timeouts
from grpo_workload.rewards.table import RewardTable
from grpo_workload.rewards.trl_signature import TrainerState
from grpo_workload.training.lost_episodes import check_lost
from grpo_workload.training.run import Evaluation, Run
from grpo_workload.training.standing import standing
from grpo_workload.training.step_metrics import summarise_evaluation

logger = logging.getLogger(__name__)

SEED = 1_618_033_988
"""Seed of the problems and their completions, apart from those that jobs train with (`training.seed`): reasoning-gym
numbers its problems from the seed on, so a job's own seed would give the problems that it trains on."""


def load_evaluation(
    config: TrainerConfig,
    tokenizer: object,
    rewards: Sequence[Reward],
    past: Mapping[int, Mapping[str, float]],
    *,
    rank: int,
    world_size: int,
    tools: ToolSchemas | None = None,
) -> Evaluation | None:
    """Prepare this rank's problems, and build the rewards; None for a job without evaluation.

    Args:
        config: the job.
        tokenizer: the model's.
        rewards: those of the training; what runs is shared.
        past: metrics of earlier evaluations of the run, by number of steps.
        rank: this rank.
        world_size: number of ranks.
        tools: what the model may call; None for a job without tools or environments.

    Raises:
        ConfigError: the dataset or a reward cannot be used.
    """
    section = config.evaluation
    if section is None:
        return None
    try:
        limit = prompt_limit(config, section.dataset)
        images = ImagePrompts.of(config)
        source = load_prompts(section.dataset, tokenizer, seed=SEED, limit=limit, images=images, tools=tools)
        count = min(len(source), section.max_prompts or len(source))
        own = [
            _untrained(source.prepare(source.draw(0, position, count))) for position in shard(count, world_size, rank)
        ]
        scorers = build_rewards(
            config.evaluation_rewards, source, running=rewards, has_environments=bool(config.environments)
        )
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from error
    if rank == 0:
        logger.info("evaluation: %d of %d problems of its dataset", count, len(source))
    return Evaluation(
        config=section, prompts=own, rewards=scorers, data=origin_of(section.dataset, source), past={**past}
    )


def _untrained(prompt: Prompt) -> Prompt:
    """Drop what only training needs: these prompts stay in memory as long as the job runs."""
    return prompt if prompt.images is None else replace(prompt, images=prompt.images.for_engines())


def is_due(config: TrainerConfig, past: Mapping[int, object], step: int, before: int) -> bool:
    """Return whether to evaluate after `step` steps, when it could last be done after `before` steps: pure."""
    section = config.evaluation
    if section is None or step in past:
        return False
    return step >= config.training.max_steps or step // section.every_steps > before // section.every_steps


def is_due_at_start(config: TrainerConfig, past: Mapping[int, object], step: int) -> bool:
    """Return whether to evaluate before the run begins at `step`: at first, and where a stop came in between."""
    if config.evaluation is None or step in past:
        return False
    length = config.training.steps_per_push
    before = max(0, step - 1) // length * length
    return (config.evaluation.at_start and not past) or is_due(config, past, step, before)


def evaluate(run: Run, step: int) -> None:
    """Evaluate the weights that were pushed last, and report the metrics; collective. `step` steps were taken.

    Raises:
        RewardError: a reward function failed.
        ConfigError: there is no metric `metricForBestModel`, or the first call of a function returned no numbers.
        EnvironmentFailedError: too many episodes were lost; every rank raises it.
    """
    evaluation, training = run.evaluation, run.config.training
    assert evaluation is not None
    section, clock = evaluation.config, Clock()
    temperature = training.temperature if section.temperature is None else section.temperature
    run.report.phase("Evaluating")
    listener = _Listener(run, evaluation)
    answers = run.generator.evaluate(evaluation.prompts, section.num_generations, temperature, listener)
    asked = [prompt for prompt in evaluation.prompts for _ in range(section.num_generations)]
    flat = [completion for group in answers for completion in group]
    state = TrainerState(global_step=step, max_steps=training.max_steps)
    seed = step_seed(SEED, step, run.rank)
    table = run.event_loop.run(score(evaluation.rewards, asked, flat, run.pulse.beat, state=state, seed=seed))
    logged = {name: one.metrics for name, one in take_logged(evaluation.rewards).items()}
    lengths = [(completion.num_own, completion.finish_reason == "length") for completion in flat]
    episodes = [EpisodeFact.of(completion.episode or Episode()) for completion in flat]
    run.pulse.meet()
    if run.config.has_episodes:
        check_lost(flat, run.config.episodes.max_failed_share)
    parts = gather((table, lengths, episodes, take_timeouts(evaluation.rewards), logged))
    metrics = summarise_evaluation(
        RewardTable.concat([part for part, *_ in parts]),
        num_generations=section.num_generations,
        completion_lengths=[length for _, own, *_ in parts for length, _ in own],
        truncated=[is_cut for _, own, *_ in parts for _, is_cut in own],
        episodes=[one for _, _, own, *_ in parts for one in own] if run.config.has_episodes else None,
    )
    for name in parts[0][3]:
        metrics[f"eval/rewards/{name}/timeouts"] = float(sum(timeouts[name] for *_, timeouts, _ in parts))
    values: dict[str, list[float]] = {}  # that users' rewards logged
    for name, key, some in ((name, *one) for *_, own in parts for name, found in own.items() for one in found.items()):
        values.setdefault(f"eval/rewards/{name}/{key}", []).extend(some)
    metrics |= {name: mean(some) for name, some in values.items()}
    evaluation.past[step] = metrics
    now = standing(section, evaluation.past)
    assert now is not None
    run.report.evaluated(step, metrics | {"time/evaluate": clock.seconds}, now.progress())
    if now.stops:
        logger.warning("earlyStoppingPatience ends the run: %s was best after %s steps", now.metric, now.best_step)


class _Listener:
    """Begins to score what is sampled, and tells the other ranks that this one makes progress."""

    def __init__(self, run: Run, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self.moved, self.meet = run.pulse.beat, run.pulse.meet

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        """See `Listener.finished`."""
        begin_scoring(self._evaluation.rewards, self._evaluation.prompts[position], completions)
