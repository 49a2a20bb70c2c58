"""Loads the model that is trained, its adapters and its reference, and lets accelerate set DeepSpeed up around it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn
from transformers import get_scheduler

from grpo_spec.contract import Device
from grpo_spec.deepspeed_config import deepspeed_config, mixed_precision
from grpo_spec.trainer import TrainerConfig
from grpo_workload.policy.adapters.lora import Adapters, add_adapters, output_layers
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.memory.optimizer_offload import OptimizerStates, reset_step_counts, uses_deepspeed_adam
from grpo_workload.policy.model.checkpoint_names import CheckpointNames
from grpo_workload.policy.model.load import load_model, restore_buffers
from grpo_workload.policy.model.router_replay import RouterReplay
from grpo_workload.policy.model.sharing import why_apart
from grpo_workload.policy.step.optimizer import make_optimizer
from grpo_workload.policy.step.reference import Reference, frozen_copy
from grpo_workload.policy.step.weight_decay import decay_weights
from grpo_workload.ranks.collectives import join
from grpo_workload.ranks.sequence_group import SequenceGroup, join_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parts of a policy."""

    accelerator: Accelerator
    group: SequenceGroup | None
    names: CheckpointNames
    shares_prompts: bool
    adapters: Adapters | None
    head: LogprobHead
    deepspeed_engine: Any
    schedule: Any  # of the learning rate
    states: OptimizerStates | None  # those that are offloaded during generation
    reference: Reference | None


def set_up(
    config: TrainerConfig,
    device: Device,
    *,
    timeout_seconds: int,
    pad_token_id: int,
    trains_entropy: bool,
    load_universal: bool,
    reference: Path | None,
) -> Setup:
    """Join the process group and load the model; collective. For arguments and errors see `Policy`.

    `trains_entropy`: whether the loss has gradients through the entropy.
    """
    ds_config = deepspeed_config(config) | {
        "zero_force_ds_cpu_optimizer": uses_deepspeed_adam(config.parallelism, device)
    }
    ds_config["checkpoint"] = {"load_universal": load_universal}
    accelerator = _accelerator(ds_config, config, device, timeout_seconds)
    group = join_group(config.parallelism.sequence, timeout_seconds)
    model = _load(config, accelerator.device)
    model.config.pad_token_id = pad_token_id
    names = CheckpointNames(model)
    replay = RouterReplay(model) if config.training.router_replay else None
    reason = why_apart(config, model.config)
    if reason is not None and dist.get_rank() == 0:
        logger.info("prompts are forwarded once for each of their completions: %s", reason)
    adapters = add_adapters(model, config)
    layers = output_layers(model) if adapters else None
    head = LogprobHead(model, layers, trains_entropy=trains_entropy, replay=replay, group=group)
    if config.parallelism.gradient_checkpointing:
        # Layers without dropout draw no random numbers: storing the generators' states for each would be a waste.
        has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": has_dropout})
    # DeepSpeed casts the whole module, but transformers and vLLM keep rotary frequencies in float32 on purpose.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    deepspeed_engine, schedule = _prepare(accelerator, model, config, device)
    states = OptimizerStates(deepspeed_engine) if config.parallelism.offload_optimizer == "generating" else None
    restore_buffers(deepspeed_engine.module, buffers, accelerator.device)
    compared: Reference | None = None
    if config.training.beta > 0:
        is_partitioned = config.parallelism.zero_stage == 3
        compared = (
            Reference(deepspeed_engine.module, head, adapters, is_partitioned=is_partitioned, group=group)
            if adapters
            else frozen_copy(
                config, accelerator.device, ds_config=ds_config, buffers=buffers, folder=reference, group=group
            )
        )
    return Setup(
        accelerator=accelerator,
        group=group,
        names=names,
        shares_prompts=reason is None,
        adapters=adapters,
        head=head,
        deepspeed_engine=deepspeed_engine,
        schedule=schedule,
        states=states,
        reference=compared,
    )


def _load(config: TrainerConfig, device: torch.device) -> Any:
    in_4_bits = config.lora if config.lora is not None and config.lora.load_in_4bit else None
    if in_4_bits is None:
        return load_model(config, device)
    from grpo_workload.policy.adapters import four_bit  # late: see `environment.show`

    model = load_model(config, device, later=lambda empty: four_bit.weights(empty, in_4_bits))
    four_bit.quantize(model, in_4_bits, device)
    return model


def _prepare(accelerator: Accelerator, model: Any, config: TrainerConfig, device: Device) -> tuple[Any, Any]:
    """Return DeepSpeed's engine around the model, with AdamW, and the learning rate's schedule."""
    optimizer = make_optimizer(
        [parameter for parameter in model.parameters() if parameter.requires_grad], config, device
    )
    schedule = get_scheduler(
        config.training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.training.warmup_steps,
        num_training_steps=config.training.max_steps,
        scheduler_specific_kwargs=dict(config.training.lr_scheduler_kwargs),
    )
    deepspeed_engine, _, schedule = accelerator.prepare(model, optimizer, schedule)
    # A single rank has no other to average with, but would still copy its gradients into a buffer of a gigabyte.
    deepspeed_engine.enable_backward_allreduce = dist.get_world_size() > 1 or config.parallelism.zero_stage > 0
    reset_step_counts(deepspeed_engine)
    if config.training.weight_decay > 0:
        decay_weights(deepspeed_engine.optimizer, deepspeed_engine.module, config.training.weight_decay)
    if deepspeed_engine.fp16_enabled():
        # At the smallest loss scale DeepSpeed would raise; skipped steps in a row are counted here for all dtypes.
        deepspeed_engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return deepspeed_engine, schedule


def _accelerator(ds_config: dict[str, Any], config: TrainerConfig, device: Device, timeout_seconds: int) -> Accelerator:
    join(device, timeout_seconds)
    return Accelerator(
        mixed_precision=mixed_precision(config),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config, zero3_init_flag=config.parallelism.zero_stage == 3),
        step_scheduler_with_optimizer=False,
    )
