"""Forward and backward passes of our trainer's micro-batches by themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from metered import PROMPT_TOKENS

WORDS = 256  # tokens are drawn from; what they say does not matter

Micro = Callable[[list[int]], None]
"""Forward and backward pass of one micro-batch of completions of these lengths."""


def ours(
    model: Path, device: str, *, liger: bool, lora: dict[str, Any] | None = None, parallelism: dict[str, Any] | None = None
) -> tuple[Any, Micro]:
    """The trainer's policy alone on one device, without an optimizer step, and what runs a micro-batch through it."""
    import torch
    from trainer_rows import set_alone

    set_alone()
    from grpo_workload import environment
    from grpo_workload.contract import Device

    environment.prepare(Device(device), os.environ)
    from grpo_workload.batching import micro_batch
    from grpo_workload.config import TrainerConfig
    from grpo_workload.engine import Policy
    from grpo_workload.loss import LossScale
    from grpo_workload.tally import Tally
    from grpo_workload.types import Completion, Prompt, Sample

    config = TrainerConfig.model_validate(
        {
            "model": {"path": str(model), "useLigerKernel": liger},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
            "rewards": [{"name": "accuracy", "accuracy": {}}],
            "training": {"importanceSamplingCorrection": "none", "maxCompletionLength": 2048},
            "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True} | (parallelism or {}),
        }
        | ({"lora": lora} if lora else {})
    )
    policy = Policy(config, Device(device), timeout_seconds=60, pad_token_id=0)
    policy.engine.train()
    rng = np.random.default_rng(0)

    def sample(length: int) -> Sample:
        answer = Completion(
            token_ids=tuple(rng.integers(WORDS, size=length).tolist()),
            logprobs=(-5.0,) * length,
            text="",
            finish_reason="length",
            weight_version=0,
        )
        return Sample(prompt=Prompt(index=0, text="", token_ids=(1,) * PROMPT_TOKENS), completion=answer, reward=1.0, advantage=0.5)

    def micro(completions: list[int]) -> None:
        batch = micro_batch([sample(length) for length in completions]).to(policy.device)
        policy.engine.set_gradient_accumulation_boundary(False)
        policy._backward(batch, LossScale(num_sequences=len(completions), num_tokens=sum(completions)), Tally())
        if device == "cuda":
            torch.cuda.synchronize()

    return policy, micro
