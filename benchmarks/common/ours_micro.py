"""Forward and backward passes of our trainer's micro-batches, without the rest of a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.lengths import PROMPT_TOKENS
from benchmarks.common.runs import set_alone

WORDS = 256  # token ids to draw from; the text does not matter

Micro = Callable[[list[int]], None]
"""Forward and backward pass of one micro-batch of completions of these lengths."""


def ours(
    model: Path,
    device: str,
    *,
    liger: bool,
    lora: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
) -> tuple[Any, Micro]:
    """The trainer's policy alone on one device, without optimizer steps, and a function that runs one micro-batch."""
    import torch

    set_alone()
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.algorithm.loss import LossScale
    from grpo_workload.algorithm.micro_batch import micro_batch
    from grpo_workload.algorithm.samples import Completion, Prompt, Sample
    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.policy.step.step_sums import StepSums

    config = TrainerConfig.model_validate(
        {
            "model": {"path": str(model), "useLigerKernel": liger},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
            "rewards": [{"name": "accuracy", "accuracy": {}}],
            "training": {"importanceSamplingCorrection": "none", "maxCompletionLength": 2048},
            "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True}
            | (parallelism or {}),
        }
        | ({"lora": lora} if lora else {})
    )
    policy = Policy(config, Device(device), timeout_seconds=60, pad_token_id=0)
    policy.deepspeed_engine.train()
    rng = np.random.default_rng(0)

    def sample(length: int) -> Sample:
        answer = Completion(
            token_ids=tuple(rng.integers(WORDS, size=length).tolist()),
            logprobs=(-5.0,) * length,
            text="",
            finish_reason="length",
            weight_version=0,
        )
        return Sample(
            prompt=Prompt(index=0, text="", token_ids=(1,) * PROMPT_TOKENS),
            completion=answer,
            reward=1.0,
            advantage=0.5,
        )

    def micro(completions: list[int]) -> None:
        batch = micro_batch([sample(length) for length in completions]).to(policy.device)
        policy.deepspeed_engine.set_gradient_accumulation_boundary(False)
        policy.passes.backward(
            batch, LossScale(num_sequences=len(completions), num_tokens=sum(completions)), StepSums()
        )
        if device == "cuda":
            torch.cuda.synchronize()

    return policy, micro
