"""The trainer's settings: the sections that the CRD and the ranks share unchanged.

`grpo_operator.api.spec` puts these models into the GRPOJob's `spec` as they are, and the contract carries them to every
rank. So each field has one name, one default and one description. Torch-free: the operator imports it.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from pydantic import Field

from grpo_spec.environments import EPISODE_RULES, EnvironmentConfig, EpisodesConfig, ToolConfig
from grpo_spec.evaluation import EvaluationConfig
from grpo_spec.generation import GenerationConfig, Topology
from grpo_spec.inputs import DatasetConfig, ModelConfig
from grpo_spec.lora import LoraConfig
from grpo_spec.parallelism import ParallelismConfig
from grpo_spec.rewards import RewardConfig
from grpo_spec.schema import Rule, Section, dump
from grpo_spec.storage import StorageConfig
from grpo_spec.training import TrainingConfig

_SAME_ROWS = "self.evaluation.dataset.split == self.dataset.split && " + " && ".join(
    f"has(self.evaluation.dataset.{name}) == has(self.dataset.{name}) && "
    f"(!has(self.dataset.{name}) || self.evaluation.dataset.{name} == self.dataset.{name})"
    for name in ("name", "config", "path")
)


_ACTS = (
    "{}.all(r, !has(r.softOverlong) || "
    "r.softOverlong.maxLength < self.training.maxCompletionLength + r.softOverlong.cacheLength)"
)
_METRIC = "self.evaluation.metricForBestModel"
_OF_A_REWARD = f"{{}}.exists(r, {_METRIC}.startsWith('eval/rewards/' + r.name + '/'))"
_OWN_REWARDS = "has(self.evaluation.rewards) && size(self.evaluation.rewards) > 0"


_UNCUT = "self.training.maxStaleness == 0 || self.generation.topology != 'Colocate'"
"""`TrainerConfig.samples_uncut` as CEL."""


class TrainerConfig(Section):
    """Everything that a rank needs to know about the training itself."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.parallelism.optimizerDtype != 'bfloat16' || self.model.dtype == 'bfloat16'",
            "parallelism.optimizerDtype bfloat16 needs model.dtype bfloat16",
            lambda c: c.parallelism.optimizer_dtype != "bfloat16" or c.model.dtype == "bfloat16",
        ),
        Rule(
            "self.parallelism.zeroStage > 0 || self.model.dtype != 'float16'",
            "model.dtype float16 needs parallelism.zeroStage 1, 2 or 3: without ZeRO, DeepSpeed sums the gradients of "
            "micro-batches in float16",
            lambda c: c.parallelism.zero_stage > 0 or c.model.dtype != "float16",
        ),
        Rule(
            "!self.parallelism.coalesceGradReduction || self.parallelism.zeroStage != 1 || "
            "self.model.dtype == 'float32'",
            "parallelism.coalesceGradReduction needs parallelism.zeroStage 2 or 3, or model.dtype float32: at stage 1 "
            "DeepSpeed always reduces half-precision gradients once a step",
            lambda c: (
                not c.parallelism.coalesce_grad_reduction or c.parallelism.zero_stage != 1 or c.model.dtype == "float32"
            ),
        ),
        Rule(
            "self.generation.engine == 'vLLM' || self.training.maxStaleness == 0",
            "training.maxStaleness over 0 needs generation.engine vLLM: transformers' generate() cannot be interrupted",
            lambda c: c.training.max_staleness == 0 or c.generation.engine == "vLLM",
        ),
        Rule(
            "!has(self.training.stop) || size(self.training.stop) == 0 || (self.generation.engine == 'vLLM' && "
            f"({_UNCUT}))",
            "training.stop needs generation.engine vLLM, and maxStaleness 0 where topology is Colocate: there a "
            "completion may be cut inside of a text at which it would end",
            lambda c: not c.training.stop or (c.generation.engine == "vLLM" and c.samples_uncut),
        ),
        Rule(
            f"!self.training.routerReplay || (self.generation.engine == 'vLLM' && ({_UNCUT}))",
            "training.routerReplay needs generation.engine vLLM, and maxStaleness 0 where topology is Colocate: there "
            "completions that were cut are computed again with newer weights, whose routers may choose other experts",
            lambda c: not c.training.router_replay or (c.generation.engine == "vLLM" and c.samples_uncut),
        ),
        Rule(
            "self.training.repetitionPenalty == 1.0 && self.training.presencePenalty == 0.0 && "
            "self.training.frequencyPenalty == 0.0 || self.generation.engine == 'vLLM'",
            "training.repetitionPenalty, presencePenalty and frequencyPenalty need generation.engine vLLM",
            lambda c: (
                (c.training.repetition_penalty, c.training.presence_penalty, c.training.frequency_penalty) == (1, 0, 0)
                or c.generation.engine == "vLLM"
            ),
        ),
        Rule(
            f"self.training.presencePenalty == 0.0 && self.training.frequencyPenalty == 0.0 || {_UNCUT}",
            "training.presencePenalty and frequencyPenalty need maxStaleness 0 where topology is Colocate: there a "
            "completion may be cut, and vLLM counts tokens only from the cut on; repetitionPenalty would work",
            lambda c: (c.training.presence_penalty, c.training.frequency_penalty) == (0, 0) or c.samples_uncut,
        ),
        Rule(
            "!has(self.lora) || !self.training.syncRefModel",
            "training.syncRefModel needs a job without lora: with adapters, the reference is the model without them",
            lambda c: c.lora is None or not c.training.sync_ref_model,
        ),
        Rule(
            "!has(self.lora) || self.lora.push == 'merged' || self.generation.topology != 'Colocate'",
            "lora.push adapters needs generation.topology Server or NodeLocal: an engine inside the trainer drops its "
            "weights when it sleeps; push merged would work",
            lambda c: not c.pushes_adapters or c.generation.topology is not Topology.COLOCATE,
        ),
        Rule(
            "!has(self.lora) || !self.lora.loadIn4Bit || self.parallelism.zeroStage < 3",
            "lora.loadIn4Bit needs parallelism.zeroStage 0, 1 or 2: stage 3 would partition the weights, and cannot "
            "partition the constants of their 4-bit blocks",
            lambda c: c.lora is None or not c.lora.load_in_4bit or c.parallelism.zero_stage < 3,
        ),
        Rule(
            "self.parallelism.offloadOptimizer != 'generating' || self.generation.topology == 'Colocate'",
            "parallelism.offloadOptimizer generating needs generation.topology Colocate: in other topologies vLLM has "
            "its own GPUs; none or cpu would work",
            lambda c: c.parallelism.offload_optimizer != "generating" or c.generation.topology is Topology.COLOCATE,
        ),
        Rule(
            f"!has(self.evaluation) || has(self.dataset.reasoningGym) || !({_SAME_ROWS})",
            "evaluation.dataset has the same rows as dataset, on which the job trains; another split, name or path "
            "would work",
            lambda c: c.evaluation is None or c.dataset.rows is None or c.evaluation.dataset.rows != c.dataset.rows,
        ),
        Rule(
            f"!has(self.evaluation) || ({_METRIC}.startsWith('eval/') && "
            f"(!{_METRIC}.startsWith('eval/rewards/') || ({_OWN_REWARDS} ? "
            f"{_OF_A_REWARD.format('self.evaluation.rewards')} : {_OF_A_REWARD.format('self.rewards')})))",
            "evaluation.metricForBestModel must be a metric of evaluations, for example eval/reward, or "
            "eval/rewards/<name>/mean of one of their rewards",
            lambda c: c.evaluation is None or c.has_metric(c.evaluation.metric_for_best_model),
        ),
        Rule(
            "!has(self.generation.maxModelLen) || self.generation.maxModelLen > self.training.maxCompletionLength",
            "generation.maxModelLen must be more than training.maxCompletionLength: it is the length of a prompt and "
            "its completion together",
            lambda c: (c.generation.max_model_len or math.inf) > c.training.max_completion_length,
        ),
        Rule(
            f"{_ACTS.format('self.rewards')} && (!has(self.evaluation) || !has(self.evaluation.rewards) || "
            f"{_ACTS.format('self.evaluation.rewards')})",
            "rewards[].softOverlong is 0 for all completions: maxLength less cacheLength must be less than "
            "training.maxCompletionLength",
            lambda c: all(
                r.soft_overlong is None
                or r.soft_overlong.max_length < c.training.max_completion_length + r.soft_overlong.cache_length
                for r in (*c.rewards, *c.evaluation_rewards)
            ),
        ),
        *EPISODE_RULES,
        Rule(
            "has(self.lora) || !has(self.storage.export) || self.storage.export.lora == 'merged'",
            "storage.export.lora adapters needs lora: a job without it has no adapters",
            lambda c: c.lora is not None or c.storage.export is None or c.storage.export.lora == "merged",
        ),
    )

    model: ModelConfig = Field(description="The policy to train.")
    dataset: DatasetConfig = Field(description="Source of prompts.")
    rewards: tuple[RewardConfig, ...] = Field(
        min_length=1,
        max_length=32,
        description="Reward functions; their weighted sum is a completion's reward.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    tools: tuple[ToolConfig, ...] = Field(
        (),
        max_length=64,
        description="Functions that the model may call. Set it to train a model that uses tools.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["function"]},
    )
    environments: tuple[EnvironmentConfig, ...] = Field(
        (),
        max_length=32,
        description="Environments in which the model acts, a new state for each completion. Set it where tools share a "
        "state, or where acting is scored.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    episodes: EpisodesConfig = Field(
        default_factory=EpisodesConfig, description="Limits of completions with tools or in an environment."
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="GRPO itself.")
    evaluation: EvaluationConfig | None = Field(
        None, description="Try problems that the job does not train on, while it trains."
    )
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of all weights.")
    parallelism: ParallelismConfig = Field(
        default_factory=ParallelismConfig, description="Spread of training over the ranks."
    )
    generation: GenerationConfig = Field(
        default_factory=GenerationConfig, description="Engine that samples completions, and its settings."
    )
    storage: StorageConfig = Field(
        default_factory=StorageConfig, description="Place of checkpoints, and times of writing."
    )

    @property
    def has_episodes(self) -> bool:
        """Whether completions may have several turns: the model may call tools, or acts in an environment."""
        return bool(self.tools or self.environments)

    @property
    def factories(self) -> tuple[EnvironmentConfig, ...]:
        """The environments whose objects the model acts on; all others have programs."""
        return tuple(one for one in self.environments if one.factory is not None)

    @property
    def evaluation_rewards(self) -> tuple[RewardConfig, ...]:
        """The reward functions of evaluations: those of the job unless the section has its own."""
        return (self.evaluation and self.evaluation.rewards) or self.rewards

    def has_metric(self, name: str) -> bool:
        """Return whether evaluations may have a metric of this name: one of a reward names one of their rewards."""
        prefix = "eval/rewards/"
        of_rewards = tuple(f"{prefix}{reward.name}/" for reward in self.evaluation_rewards)
        return name.startswith("eval/") and (not name.startswith(prefix) or name.startswith(of_rewards))

    @property
    def samples_uncut(self) -> bool:
        """Whether the engine samples each completion in one go: one that samples ahead in Colocate is put to sleep."""
        return self.training.max_staleness == 0 or self.generation.topology is not Topology.COLOCATE

    @property
    def adapters(self) -> dict[str, Any] | None:
        """The section lora as JSON, without `push`: the settings that a checkpoint of adapters must match."""
        return None if self.lora is None else {name: value for name, value in dump(self.lora).items() if name != "push"}

    @property
    def begins_as_loaded(self) -> bool:
        """Whether the policy begins with the weights that engines load themselves."""
        return self.lora is None or (self.lora.path is None and not self.lora.load_in_4bit)

    @property
    def pushes_adapters(self) -> bool:
        """Whether engines keep the model's own weights and receive only adapters."""
        return self.lora is not None and self.lora.push == "adapters"
