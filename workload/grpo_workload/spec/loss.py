"""Settings of the loss and the advantages. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_workload.spec.schema import Section

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "bypass"]


class LossConfig(Section):
    """The part of `spec.training` that is about the loss and the advantages. Field names are those of TRL."""

    loss_type: Literal["grpo", "dapo", "dr_grpo"] = Field("dapo", description="How token losses are aggregated.")
    epsilon: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="The probability ratio is clipped at 1 - epsilon, and at 1 + epsilon when epsilonHigh is not set.",
    )
    epsilon_high: float | None = Field(
        None, gt=0, le=10, description="The probability ratio is clipped at 1 + epsilonHigh."
    )
    beta: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the KL divergence (k3 estimator) from the initial model; 0 loads no reference model.",
    )
    importance_sampling_correction: Correction | None = Field(
        None,
        description="What the loss does when the generator's log-probabilities differ from the trainer's. token_* and "
        "sequence_*: multiply it by the ratio of the probabilities, truncated to importanceSamplingClip* or masked "
        "outside of these bounds. bypass: take the generator's log-probabilities as those of the old policy. none: "
        "ignore it. Default: sequence_mask; token_truncate if maxStaleness is over 0.",
    )
    importance_sampling_clip_max: float | None = Field(
        3.0, gt=0, le=1e6, description="Upper bound of the ratio that importanceSamplingCorrection applies."
    )
    importance_sampling_clip_min: float | None = Field(
        None, ge=0, le=1, description="Lower bound of the ratio that importanceSamplingCorrection applies."
    )
    off_policy_mask_threshold: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Completions with a negative advantage are left out of the loss if the policy has made them less "
        "likely since they were sampled, by more than this many nats a token on average. Default: none is.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="What advantages are divided by: the standard deviation of the rewards in the prompt group or in "
        "the whole batch, or nothing.",
    )
    mask_truncated_completions: bool = Field(
        False, description="Leave completions that were cut at maxCompletionLength out of the loss."
    )
