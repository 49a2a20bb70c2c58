"""DeepSpeed's and accelerate's configuration, as a user would have written them by hand for a multi-node run. Torch-free and pure.

The trainer runs under the first; the second says the same to whoever reads accelerate's files, and is what `accelerate launch
--config_file` would have been given on each machine (huggingface/accelerate, commands/config/cluster.py). `grpo render` shows both, and
every launcher writes them into its state folder.
"""

from __future__ import annotations

from typing import Any

from grpo_workload.config import TrainerConfig
from grpo_workload.contract import Contract, Device, Member

REDUCE_ELEMENTS = 50_000_000
"""Of a bucket that is reduced or gathered at once: DeepSpeed's own default keeps buffers of 2 GB in float32."""

_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def mixed_precision(config: TrainerConfig) -> str:
    """What accelerate and DeepSpeed are told of the weights' type: bf16, fp16 or no."""
    keeps_half = config.parallelism.optimizer_dtype == "bfloat16"
    # Below stage 1 DeepSpeed has no mode without masters; told nothing, it leaves the weights and their AdamW as they are.
    return "no" if keeps_half and config.parallelism.zero_stage == 0 else _PRECISION[config.model.dtype]


def clips_itself(config: TrainerConfig) -> bool:
    """Whether the trainer clips gradients: without ZeRO and masters DeepSpeed would, a parameter at a time, and forget the norm."""
    return config.parallelism.zero_stage == 0 and mixed_precision(config) == "no"


def deepspeed_config(config: TrainerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    parallelism, training, precision = config.parallelism, config.training, mixed_precision(config)
    zero: dict[str, Any] = {
        "stage": parallelism.zero_stage,
        "reduce_bucket_size": REDUCE_ELEMENTS,
        "allgather_bucket_size": REDUCE_ELEMENTS,
        "overlap_comm": parallelism.zero_stage == 3,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu" if parallelism.offload_optimizer == "cpu" else "none"},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    keeps_half = parallelism.optimizer_dtype == "bfloat16"
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are cut by tokens; DeepSpeed wants a number to be there
        "gradient_accumulation_steps": 1,  # the loss is scaled by the whole step, and the trainer says where a step ends
        "gradient_clipping": 0.0 if clips_itself(config) else training.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        # loss_scale 0 is dynamic. Hysteresis would skip two steps, with all that was sampled for them, before the scale is lowered once.
        "fp16": {"enabled": precision == "fp16", "loss_scale": 0, "hysteresis": 1},
    }
    if parallelism.zero_stage > 0:
        ds_config["data_types"] = {"grad_accum_dtype": "bf16" if keeps_half else "fp32"}
        ds_config["bf16"] |= {"bf16_master_weights_and_grads": keeps_half, "bf16_optimizer_states": keeps_half}
    return ds_config


def accelerate_config(contract: Contract, member: Member) -> dict[str, Any]:
    """Accelerate's configuration for one machine. Its machines are assumed to have equal numbers of processes; ranks here are not."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": contract.config.parallelism.zero_stage == 3},
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
