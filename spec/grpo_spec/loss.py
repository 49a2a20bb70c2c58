"""Settings of the loss and the advantages. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from grpo_spec.schema import FunctionPath, Rule, Section

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "bypass"]


class LossConfig(Section):
    """The part of `spec.training` that is about the loss and the advantages. Field names are those of TRL."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.lossType != 'cispo' || (has(self.epsilonHigh) && self.epsilonHigh >= 1.0)",
            "with lossType cispo, epsilonHigh is the largest ratio itself, at least 1; epsilonHigh 5 would work",
            lambda loss: loss.loss_type != "cispo" or (loss.epsilon_high or 0) >= 1,
        ),
        Rule(
            "!has(self.delta) || !(self.lossType in ['cispo', 'sapo', 'gmpo'])",
            "lossType cispo, sapo and gmpo bound the ratio in their own way: delta must not be set",
            lambda loss: loss.delta is None or loss.loss_type not in ("cispo", "sapo", "gmpo"),
        ),
        Rule(
            "self.lossType != 'gmpo' || self.importanceSamplingLevel == 'token'",
            "lossType gmpo makes one ratio of those of a completion's tokens: importanceSamplingLevel token would work",
            lambda loss: loss.loss_type != "gmpo" or loss.importance_sampling_level == "token",
        ),
        Rule(
            "!has(self.delta) || self.delta > 1.0 + (has(self.epsilonHigh) ? self.epsilonHigh : self.epsilon)",
            "delta must be more than 1 + epsilonHigh (or 1 + epsilon): ratios are clipped there already",
            lambda loss: loss.delta is None or loss.delta > 1 + (loss.epsilon_high or loss.epsilon),
        ),
        Rule(
            "self.advantageEstimator == 'grpo' || self.multiObjectiveAggregation == 'sum_then_normalize'",
            "advantageEstimator other than grpo needs multiObjectiveAggregation sum_then_normalize",
            lambda loss: loss.advantage_estimator == "grpo" or loss.multi_objective_aggregation == "sum_then_normalize",
        ),
        Rule(
            "!self.klInReward || (self.beta > 0.0 && self.multiObjectiveAggregation == 'sum_then_normalize')",
            "klInReward needs beta over 0, its weight, and multiObjectiveAggregation sum_then_normalize",
            lambda loss: (
                not loss.kl_in_reward or (loss.beta > 0 and loss.multi_objective_aggregation == "sum_then_normalize")
            ),
        ),
        Rule(
            "!self.syncRefModel || self.beta > 0.0",
            "syncRefModel needs beta over 0: without it there is no reference model",
            lambda loss: not loss.sync_ref_model or loss.beta > 0,
        ),
    )

    loss: FunctionPath | None = Field(
        None,
        description="A function of your own (module:function) in place of the token losses of lossType, which still "
        "says what their sum is divided by: from log-probabilities and advantages it computes each token's. Set it to "
        "try a loss that lossType does not have.",
    )
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "gmpo"] = Field(
        "dapo",
        description="Token losses, and what their sum is divided by. PPO's clipped loss, divided by the tokens of all "
        "steps of the generation (dapo) or of the step (bnpo), first by each completion's own tokens (grpo), or by "
        "maxCompletionLength (dr_grpo). cispo: tokens that are clipped keep a gradient, divided as dapo. sapo: a soft "
        "gate in place of the clip, divided as grpo. gmpo: the geometric mean of a completion's clipped ratios, "
        "divided as grpo. Set what docs/training.md names for your case.",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token",
        description="Whose probability ratio the loss takes: the token's, or the mean of its completion (GSPO). Set "
        "sequence, and lossType grpo with it, for mixtures of experts and long completions, where it is steadier.",
    )
    epsilon: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="The probability ratio is clipped at 1 - epsilon, and at 1 + epsilon when epsilonHigh is not set; "
        "with gmpo, its logarithm at -epsilon and epsilon. Lower it to 3e-4 with importanceSamplingLevel sequence, "
        "raise it to 0.4 with gmpo.",
    )
    epsilon_high: float | None = Field(
        None,
        gt=0,
        le=10,
        description="The probability ratio is clipped at 1 + epsilonHigh; with cispo, at epsilonHigh. Set 0.28 (DAPO) "
        "to let unlikely tokens become likelier where trained/entropy falls to 0, and 5 with cispo.",
    )
    delta: float | None = Field(
        None,
        gt=1,
        le=1000,
        description="Upper bound of the ratio where the advantage is negative, above 1 + epsilonHigh: set it if single "
        "tokens make the loss jump. Default: none.",
    )
    sapo_temperature_pos: float = Field(
        1.0,
        gt=0,
        le=100,
        description="sapo: how fast gradients fade with the ratio where the advantage is positive. Lower it to learn "
        "more from tokens whose probability has changed since they were sampled.",
    )
    sapo_temperature_neg: float = Field(
        1.05, gt=0, le=100, description="sapo: the same where it is negative. Raise it where training is not stable."
    )
    beta: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the KL divergence (k3 estimator) from the initial model; 0 loads no reference model.",
    )
    kl_in_reward: bool = Field(
        False,
        description="Subtract beta times a completion's KL divergence from its reward, in place of the loss's KL "
        "term. Set it to train as REINFORCE++ and TRL's RLOO do. A step takes one more forward pass. Metric kl is "
        "then its mean over tokens (k1).",
    )
    sync_ref_model: bool = Field(
        False,
        description="Let the reference model of beta follow the policy (TR-DPO): set it if kl grows over a long run "
        "and holds the policy back.",
    )
    ref_model_mixup_alpha: float = Field(
        0.6,
        gt=0,
        le=1,
        description="syncRefModel: share of the policy's weights in the new reference model. Lower it where the "
        "reference should stay nearer to the initial model.",
    )
    ref_model_sync_steps: int = Field(
        512,
        ge=1,
        le=10_000_000,
        description="syncRefModel: number of steps after which the reference model follows. Lower it where maxSteps "
        "is not many times larger: until then it is the initial model.",
    )
    entropy_coef: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Weight of the mean entropy of tokens, which the loss rewards. Set 1e-3 or less if "
        "trained/entropy falls to 0 early and completions become all alike.",
    )
    top_entropy_quantile: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Only this share of a step's tokens, those of the highest entropies, is in the policy's loss. Set "
        "0.2 for long reasoning, to train on the tokens at which the model hesitates. Below 1 a step takes one more "
        "forward pass.",
    )
    importance_sampling_correction: Correction = Field(
        "token_truncate",
        description="What the loss does when the generator's log-probabilities differ from the trainer's. token_* and "
        "sequence_*: multiply it by the ratio of the probabilities, truncated to importanceSamplingClip* or masked "
        "outside of these bounds. bypass: take the generator's log-probabilities as those of the old policy. none: "
        "ignore it. Set token_mask for mixtures of experts, and sequence_mask, TRL's default, for completions of some "
        "hundred tokens alone.",
    )
    importance_sampling_clip_max: float | None = Field(
        3.0,
        gt=0,
        le=1e6,
        description="Upper bound of the ratio that importanceSamplingCorrection applies. Lower it where steps with "
        "large ratios make training unstable (trained/sampling/importance_sampling_ratio/max).",
    )
    importance_sampling_clip_min: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Lower bound of the ratio that importanceSamplingCorrection applies. Set it, for example 0.5 with "
        "token_mask, to leave out tokens that the trainer finds far less likely than the engine, as with mixtures of "
        "experts.",
    )
    off_policy_mask_threshold: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Completions with a negative advantage are left out of the loss if the policy has made them less "
        "likely since they were sampled, by more than this many nats a token on average. Set it where maxStaleness or "
        "several steps for a generation make training unstable. Default: none is.",
    )
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = Field(
        "grpo",
        description="Whose mean reward is subtracted from a completion's: that of its prompt group (grpo), or of the "
        "others in the group (rloo), which leaves no bias. Set rloo, and scaleRewards none with it, where groups are "
        "small. reinforce_plus_plus: as grpo, with scaleRewards batch, which divides by the deviation of these "
        "differences. reinforce_plus_plus_baseline: these differences are whitened over all tokens "
        "of the batch, and scaleRewards has no effect.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="normalize_then_sum (GDPO): the rewards of each function are normalised in their prompt group "
        "before they are summed; scaleRewards has no effect. Set it where one reward drowns the others, as its range "
        "is larger.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="What advantages are divided by: the standard deviation of the rewards in the prompt group or in "
        "the whole batch, or nothing. Set batch where some groups have a deviation near 0 and their advantages jump; "
        "none where differences of rewards should count as they are.",
    )
    mask_truncated_completions: bool = Field(
        False,
        description="Leave completions that were cut at maxCompletionLength out of the loss. Set it where many are "
        "cut that might have become right.",
    )

    @property
    def kl_coef(self) -> float:
        """Weight of the KL divergence in the loss."""
        return 0.0 if self.kl_in_reward else self.beta

    @property
    def trains_advantage_0(self) -> bool:
        """Whether completions of advantage 0 may have a gradient."""
        return self.kl_coef > 0 or self.loss is not None or self.entropy_coef > 0 or self.top_entropy_quantile < 1
