"""AdamW as a job sets it."""

from __future__ import annotations

from typing import Any

import torch

from grpo_spec.contract import Device
from grpo_spec.trainer import TrainerConfig


def make_optimizer(parameters: list[Any], config: TrainerConfig, device: Device) -> torch.optim.Optimizer:
    """Return AdamW without weight decay, which `decay_weights` adds."""
    if config.parallelism.optimizer_dtype == "int8":
        from grpo_workload.policy.step.int8_moments import Int8Adam  # late: see `environment.show`

        return Int8Adam(parameters, config.training)
    training = config.training
    return torch.optim.AdamW(
        parameters,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        weight_decay=0.0,
        fused=device == Device.CUDA,
    )
