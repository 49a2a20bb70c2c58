"""The section `evaluation`: problems that the job does not train on, and how often it tries them.

Torch-free: the operator imports it.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from grpo_spec.inputs import DatasetConfig
from grpo_spec.rewards import RewardConfig
from grpo_spec.schema import Rule, Section, Text


class EvaluationConfig(Section):
    """Evaluate while the job trains, on its own engines and with the weights that were just pushed."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.temperature) || self.temperature == 0.0 || self.temperature >= 0.01",
            "evaluation.temperature must be 0 or at least 0.01: vLLM would raise lower ones",
            lambda e: e.temperature is None or e.temperature == 0 or e.temperature >= 0.01,
        ),
        Rule(
            "!has(self.temperature) || self.temperature > 0.0 || self.numGenerations == 1",
            "evaluation.temperature 0 needs evaluation.numGenerations 1: all completions of a prompt would be equal",
            lambda e: e.temperature != 0 or e.num_generations == 1,
        ),
    )

    dataset: DatasetConfig = Field(
        description="Problems that the job does not train on, for example the split `test`. Problems of reasoning-gym "
        "have another seed than those of spec.dataset, the same one in all jobs. dataloaderNumWorkers and "
        "prefetchSteps have no effect."
    )
    rewards: tuple[RewardConfig, ...] = Field(
        (),
        max_length=32,
        description="Reward functions of the evaluation; those of the job when empty. Set it to measure only whether "
        "answers are right.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    every_steps: int = Field(
        ge=1,
        le=1_000_000,
        description="Steps between evaluations. With training.stepsPerGeneration or numIterations, it is made after "
        "the last step of its generation.",
    )
    at_start: bool = Field(
        True,
        description="Also evaluate before the first step: what the model can do untrained. Set false where that is "
        "known and takes long.",
    )
    max_prompts: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Number of problems, drawn from the dataset once and the same each time; all of them when not "
        "set. Lower it when evaluations take too much of the time (metric time/evaluate).",
    )
    num_generations: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of completions sampled for each problem. More than 1 gives steadier means, and the metrics "
        "pass@k and best@k.",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=10,
        description="Sampling temperature; training.temperature when not set, so that rewards compare with those of "
        "training. 0 takes the likeliest token each time, as benchmarks often do.",
    )
    metric_for_best_model: Text = Field(
        "eval/reward",
        description="Metric that says which evaluation is the best. Set it where only a part of the reward says how "
        "good the model is, for example eval/rewards/accuracy/mean.",
    )
    greater_is_better: bool = Field(
        True,
        description="Whether a larger value of metricForBestModel is better. Set false for one that should fall, such "
        "as eval/completions/clipped_ratio.",
    )
    save_best: bool = Field(
        True,
        description="Save a checkpoint where an evaluation is the best so far. It stays, beyond storage.keep, until a "
        "better one. Set false where saving takes long: that keeps the best of those that "
        "storage.checkpointEverySteps saves.",
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="End the job as Succeeded after so many evaluations in a row without a better value of "
        "metricForBestModel. Set it where reward goes on to rise while problems not trained on are no longer solved "
        "better.",
    )
