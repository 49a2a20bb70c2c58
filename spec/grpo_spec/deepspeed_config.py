"""The configurations of DeepSpeed and accelerate that a user would write for this run by hand. Torch-free and pure.

The trainer runs with DeepSpeed's. Accelerate's is there to be read: `accelerate launch --config_file` would take it on
each machine (huggingface/accelerate, commands/config/cluster.py). `grpo render` shows both, and every launcher writes
them into its state folder.
"""

from __future__ import annotations

from typing import Any

from grpo_spec.contract import Contract, Device, Member
from grpo_spec.trainer import TrainerConfig

BUCKET_ELEMENTS = 50_000_000
"""Elements that are reduced or gathered at once. DeepSpeed's default keeps buffers of 2 GB in float32."""

_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def mixed_precision(config: TrainerConfig) -> str:
    """Return the mixed precision mode for accelerate and DeepSpeed: bf16, fp16 or no."""
    keeps_half = config.parallelism.optimizer_dtype == "bfloat16"
    # At stage 0 each DeepSpeed mode adds float32 master weights; without a mode weights and AdamW stay as they are.
    return "no" if keeps_half and config.parallelism.zero_stage == 0 else _PRECISION[config.model.dtype]


def trainer_clips(config: TrainerConfig) -> bool:
    """Return whether the trainer clips gradients in place of DeepSpeed.

    Without ZeRO and master weights, DeepSpeed would clip in a slow loop over the parameters and not report the norm.
    """
    return config.parallelism.zero_stage == 0 and mixed_precision(config) == "no"


def deepspeed_config(config: TrainerConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    parallelism, training, precision = config.parallelism, config.training, mixed_precision(config)
    zero: dict[str, Any] = {
        "stage": parallelism.zero_stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "overlap_comm": parallelism.zero_stage == 3,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu" if parallelism.offload_optimizer == "cpu" else "none"},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    if parallelism.zero_stage == 3:
        # Without this, DeepSpeed makes leaf modules of some families' blocks of experts, since ranks may call different
        # experts. transformers stacks these in one parameter, which all ranks gather; and the hooks of leaf modules
        # take the trial's backward pass for a step's.
        zero["leaf_module"] = {"classes": []}
    keeps_half = parallelism.optimizer_dtype == "bfloat16"
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed; micro-batches are cut by tokens
        "gradient_accumulation_steps": 1,  # the loss is scaled for the whole step; the trainer marks where a step ends
        "gradient_clipping": 0.0 if trainer_clips(config) else training.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        # loss_scale 0 is dynamic. DeepSpeed's hysteresis of 2 would skip two steps, and waste their samples, before it
        # lowers the scale once.
        "fp16": {"enabled": precision == "fp16", "loss_scale": 0, "hysteresis": 1},
    }
    if parallelism.zero_stage > 0:
        ds_config["data_types"] = {"grad_accum_dtype": "bf16" if keeps_half else "fp32"}
        ds_config["bf16"] |= {"bf16_master_weights_and_grads": keeps_half, "bf16_optimizer_states": keeps_half}
    return ds_config


def accelerate_config(contract: Contract, member: Member) -> dict[str, Any]:
    """Return accelerate's configuration for one machine.

    Accelerate assumes the same number of processes on every machine; here pods may have different numbers of ranks.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": contract.config.parallelism.zero_stage == 3,
        },
        "machine_rank": contract.members.index(member),
        "main_process_ip": contract.master.host,
        "main_process_port": contract.master_port,
        "num_machines": len(contract.members),
        "num_processes": contract.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "mixed_precision": mixed_precision(contract.config),
        "use_cpu": contract.device is Device.CPU,
        "main_training_function": "main",
    }
