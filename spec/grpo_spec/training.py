"""The section `training`: GRPO itself. Fields have the names of TRL's `GRPOConfig` in camelCase.

Torch-free: the operator imports it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from grpo_spec.loss import LossConfig
from grpo_spec.optimizer import OptimizerConfig
from grpo_spec.schema import Rule
from grpo_spec.tracking import TrackingConfig

MICRO_BATCH_TOKENS = 8192
"""Tokens of a micro-batch where neither the job sets a maximum nor the trainer chooses one."""


class TrainingConfig(LossConfig, OptimizerConfig, TrackingConfig):
    """GRPO itself. The batch of a step is promptsPerStep x numGenerations completions, however many ranks share it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *LossConfig.RULES,
        *OptimizerConfig.RULES,
        Rule(
            "self.maxStaleness == 0 || self.stepsPerGeneration * self.numIterations == 1",
            "maxStaleness over 0 needs stepsPerGeneration 1 and numIterations 1: it begins the prompts of later steps "
            "while engines get new weights after each; maxStaleness 0 would work",
            lambda t: t.max_staleness == 0 or t.steps_per_push == 1,
        ),
        Rule(
            "self.maxStaleness == 0 || self.maxResampleTimes == 0",
            "maxStaleness over 0 needs maxResampleTimes 0: which groups a step replaces is known only when it trains, "
            "after later steps have begun; maxStaleness 0 would work",
            lambda t: t.max_staleness == 0 or t.max_resample_times == 0,
        ),
    )

    num_generations: int = Field(
        8, ge=2, le=1024, description="Number of completions sampled for each prompt (GRPO's group)."
    )
    prompts_per_step: int = Field(
        8, ge=1, le=65536, description="Number of prompts in one optimizer step, over all ranks."
    )
    steps_per_generation: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of steps whose prompts are sampled at once, with the same weights. Each step trains on "
        "its own prompts; engines get new weights after the last one. Raise it where steps wait long for their last "
        "completions.",
    )
    num_iterations: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of times that these steps are repeated on the same completions: one generation serves "
        "stepsPerGeneration x numIterations optimizer steps. Raise it where sampling takes far longer than training.",
    )
    max_resample_times: int = Field(
        0,
        ge=0,
        le=64,
        description="Dynamic sampling (DAPO): how often a step samples further prompts to replace groups in which all "
        "rewards are equal, which teach nothing. Set 3 where frac_reward_zero_std is high; 0: never.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="By how many updates the weights that sampled a token may be older than those that train on it. "
        "0: each step samples, then trains. n: completions of the next n steps are sampled meanwhile. Set 1 to 4 "
        "where engines and ranks wait for the longest completion of a step.",
    )
    max_tool_calling_iterations: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="How often a completion may call tools before it ends; calls of one turn count as one. Set it "
        "where the model calls again and again. Default: as often as maxCompletionLength leaves room.",
    )
    max_steps: int = Field(100, ge=1, le=10_000_000, description="Number of optimizer steps to take.")
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        le=16_777_216,
        description="Maximum number of tokens in one micro-batch on one rank; it bounds the memory for activations. A "
        "longer sequence gets a micro-batch to itself. When not set, the trainer measures how many fit, up to 65536; "
        "without a GPU 8192. Set it for the same micro-batches on any GPU.",
    )
    per_device_train_batch_size: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Maximum number of completions in one micro-batch on one rank; when not set, only "
        "maxTokensPerMicroBatch limits it.",
    )
    max_skipped_steps: int = Field(
        10,
        ge=0,
        le=10_000_000,
        description="Steps in a row that may be skipped because numbers are not finite; one more ends the job as "
        "NotFinite. Set 0 to end it with the first one, and look into that.",
    )
    max_completion_length: int = Field(256, ge=1, le=1_048_576, description="Maximum number of tokens in a completion.")
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=10,
        description="Sampling temperature; training computes log-probabilities at it too. Lower ones are refused: vLLM "
        "would raise them, and at 0 all completions of a prompt would be equal.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling; 1 keeps the whole vocabulary. Lower it, for example to 0.95, where single odd "
        "tokens spoil completions. What topP, topK and minP leave out of sampling is left out of the trainer's "
        "log-probabilities, too.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Top-k sampling; 0 keeps the whole vocabulary. Set it to sample as the model's card says, for "
        "example 20.",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Tokens of less than this share of the likeliest token's probability are not sampled; 0 keeps the "
        "whole vocabulary. Set it, for example 0.05, at temperatures over 1, where topP keeps too much.",
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.1,
        le=10,
        description="Over 1: tokens that prompt or completion already have are less likely. Set 1.05 where completions "
        "repeat themselves without end. The trainer's log-probabilities are those under penalties.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logits of tokens that the completion already has. Set it in place of "
        "repetitionPenalty where completions must repeat tokens of their prompts.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="The same, once for each time that the token came. Set it where a few repetitions are right.",
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        (),
        max_length=16,
        description="Texts at which a completion ends, for example </answer>. It keeps the text and counts as "
        "ended by itself. Set it where the model goes on after its answer.",
    )
    router_replay: bool = Field(
        False,
        description="For mixtures of experts: train each token through the experts that vLLM chose for it (R3), where "
        "the trainer's routers, which round differently, would choose others. Set it where sampling/kl of such a model "
        "is high. It takes 384 bytes a token for Qwen3-30B-A3B.",
    )
    seed: int = Field(
        42,
        ge=0,
        le=2**31 - 1,
        description="Seed of data order, sampling and initialisation. Change it to see how much of a result is chance.",
    )

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum number of tokens in a micro-batch; the trainer sets the field before it trains."""
        return self.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS

    @property
    def steps_per_push(self) -> int:
        """Number of optimizer steps from one generation, and one push of weights, to the next."""
        return self.steps_per_generation * self.num_iterations
