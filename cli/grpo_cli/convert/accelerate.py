"""accelerate's options: what `accelerate config` writes, with its sections deepspeed_config and fsdp_config flattened by a dot."""

from __future__ import annotations

from grpo_cli.convert import values as v
from grpo_cli.convert.rows import Table, differs, left, not_needed

_OPERATOR = "the operator gives every rank its place and starts it"
_ZERO3 = "weights are gathered in buckets where they are needed whole"


def _unless_auto(value: object) -> float | None:
    return None if str(value).lower() == "auto" else v.number(value)


def _fsdp(names: str) -> str:
    return " ".join(f"fsdp_config.fsdp_{name}" for name in names.split())


ACCELERATE = Table.of(
    "accelerate",
    "1.15.0",
    differs("num_machines", "pods of the trainer's group: trainer.groups[].replicas", v.positive, fact="nodes"),
    differs("num_processes", "ranks of all nodes: replicas x gpus, which may differ between groups", v.positive, fact="processes"),
    differs("distributed_type", "DeepSpeed ZeRO, whatever it was before: MULTI_GPU is stage 0", fact="distributed_type"),
    differs("mixed_precision", "the type of weights; masters are float32", fact="mixed_precision"),
    differs("use_cpu", "device.type: cpu", v.boolean, fact="use_cpu"),
    not_needed(
        "compute_environment machine_rank main_process_ip main_process_port rdzv_backend same_network main_training_function gpu_ids "
        "enable_cpu_affinity debug command_file commands",
        _OPERATOR,
    ),
    left("mpirun_config", _OPERATOR, "{}"),
    left("fp8_config", "training in 8 bits does not exist here", "{}"),
    left("parallelism_config", "ranks share data alone: use zeroStage 3 for models that do not fit", "{}"),
    left("megatron_lm_config", "Megatron's parallelism does not exist here: use zeroStage 3", "{}"),
    left("dynamo_config", "models are not compiled", "{}"),
    left("downcast_bf16 tpu_use_cluster tpu_use_sudo", "TPUs do not exist here", False),
    left("tpu_name tpu_zone tpu_vm tpu_env", "TPUs do not exist here", "[]"),
    differs("deepspeed_config.zero_stage", "parallelism.zeroStage", v.integer, fact="zero_stage"),
    differs(
        "deepspeed_config.offload_optimizer_device",
        "parallelism.offloadOptimizer; nvme is cpu here",
        v.one_of({"none": False, "cpu": True, "nvme": True}, "none or cpu would do"),
        fact="offload",
    ),
    left("deepspeed_config.offload_param_device", "weights stay on the GPUs, partitioned by stage 3", "none"),
    left("deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path", "states are offloaded to memory", "none"),
    differs("deepspeed_config.gradient_accumulation_steps", "as TRL's own, which has precedence", _unless_auto, fact="accumulation"),
    differs("deepspeed_config.gradient_clipping", "as max_grad_norm, which has precedence", _unless_auto, fact="clipping"),
    differs(
        "deepspeed_config.deepspeed_config_file",
        "its stage and whether the optimizer is offloaded, as its name says; the rest is set by the job",
        v.deepspeed,
        fact="deepspeed",
    ),
    not_needed("deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model", _ZERO3),
    not_needed(
        "deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile deepspeed_config.deepspeed_inclusion_filter "
        "deepspeed_config.deepspeed_exclusion_filter",
        _OPERATOR,
    ),
    left("deepspeed_config.deepspeed_moe_layer_cls_names", "layers are gathered by bucket"),
    differs(
        "fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_reshard_after_forward",
        "DeepSpeed ZeRO shards instead: FULL_SHARD is stage 3, SHARD_GRAD_OP 2",
        v.fsdp,
        fact="fsdp",
    ),
    differs("fsdp_config.fsdp_offload_params", "parallelism.offloadOptimizer: cpu", v.boolean, fact="offload"),
    differs("fsdp_config.fsdp_activation_checkpointing", "recomputes activations", v.boolean, to="parallelism.gradientCheckpointing"),
    not_needed(
        _fsdp(
            "auto_wrap_policy backward_prefetch cpu_ram_efficient_loading forward_prefetch min_num_params state_dict_type "
            "sync_module_states transformer_layer_cls_to_wrap use_orig_params version"
        ),
        "settings of FSDP's; DeepSpeed ZeRO is used",
    ),
)
