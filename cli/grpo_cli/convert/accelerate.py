"""accelerate's options, as `accelerate config` writes them, where those of its sections are named `section.option`, and
as launchers take them.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_cli.convert import values as v
from grpo_cli.convert.rows import Table, differs, left, not_needed, rows, under

_OPERATOR = "the operator starts every rank and assigns its devices"
_ZERO3 = "whole weights are gathered in buckets where they are needed"


def _unless_auto(convert: Callable[[object], float]) -> Callable[[object], float | None]:
    return lambda value: None if str(value).lower() == "auto" else convert(value)


def _gpus(value: object) -> int:
    if not str(value).isdigit():
        raise v.LeftError("only a run says how many these are: give --gpus")
    return v.positive(value)


# fmt: off
DEEPSPEED = rows(
    differs("zero_stage", "parallelism.zeroStage@zero_stage", "parallelism.zeroStage"),
    differs("offload_optimizer_device", "parallelism.offloadOptimizer@offload",
        "parallelism.offloadOptimizer; nvme becomes cpu",
        convert=v.one_of({False: "none", True: "cpu nvme"}, "use none or cpu")),
    left("offload_param_device", "weights stay on the GPUs, partitioned by stage 3", "none"),
    left("offload_optimizer_nvme_path offload_param_nvme_path", "states are offloaded to memory only", "none"),
    differs("gradient_accumulation_steps", "training.promptsPerStep@accumulation", "TRL's option has precedence",
        convert=_unless_auto(v.positive)),
    differs("gradient_clipping", "training.maxGradNorm@clipping", "max_grad_norm has precedence",
        convert=_unless_auto(v.number)),
    differs("deepspeed_config_file", "parallelism@deepspeed",
        "stage and optimizer offloading, as its name says; the job sets the rest"),
    not_needed("zero3_init_flag zero3_save_16bit_model", _ZERO3),
    not_needed("deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter",
        _OPERATOR),
    left("deepspeed_moe_layer_cls_names", "layers are gathered by bucket"),
)

FSDP = under("fsdp_",
    differs("sharding_strategy reshard_after_forward", "parallelism@fsdp",
        "DeepSpeed ZeRO shards instead: FULL_SHARD is stage 3, SHARD_GRAD_OP 2"),
    differs("offload_params", "parallelism.offloadOptimizer@offload", "parallelism.offloadOptimizer: cpu"),
    differs("activation_checkpointing", "parallelism.gradientCheckpointing", "recomputes activations"),
    not_needed("auto_wrap_policy backward_prefetch cpu_ram_efficient_loading forward_prefetch min_num_params "
        "state_dict_type sync_module_states transformer_layer_cls_to_wrap use_orig_params version",
        "only FSDP uses it; DeepSpeed ZeRO is used here"),
)

ACCELERATE = Table.of("accelerate", "1.15.0",
    differs("num_machines", "trainer.groups@nodes", "pods of the trainer's group: trainer.groups[].replicas"),
    differs("num_processes", "trainer.groups@processes", "ranks of all nodes: replicas x gpus"),
    differs("distributed_type", "parallelism.zeroStage@distributed_type",
        "always DeepSpeed ZeRO: MULTI_GPU is stage 0, FSDP 3"),
    differs("mixed_precision", "model.dtype@mixed_precision", "type of the weights; master weights are float32"),
    differs("use_cpu", "device.type@use_cpu", "device.type: cpu"),
    not_needed("compute_environment machine_rank main_process_ip main_process_port rdzv_backend same_network "
        "main_training_function gpu_ids enable_cpu_affinity debug command_file commands", _OPERATOR),
    left("mpirun_config", _OPERATOR, "{}"),
    left("fp8_config", "8-bit training is not supported", "{}"),
    left("parallelism_config", "ranks are data-parallel only: use zeroStage 3 for models that do not fit", "{}"),
    left("megatron_lm_config", "Megatron's parallelism is not supported: use zeroStage 3", "{}"),
    left("dynamo_config", "models are not compiled", "{}"),
    left("downcast_bf16 tpu_use_cluster tpu_use_sudo", "TPUs are not supported", False),
    left("tpu_name tpu_zone tpu_vm tpu_env", "TPUs are not supported", "[]"),
    under("deepspeed_config.", DEEPSPEED),
    under("fsdp_config.", FSDP),
    DEEPSPEED,
    FSDP,
    # Of `accelerate launch` alone, torchrun and deepspeed.
    left("config_file", "its options are not known: give grpo convert that file, too"),
    differs("multi_gpu", "parallelism.zeroStage@distributed_type", "zeroStage 0", convert=lambda value: "MULTI_GPU"),
    differs("use_fsdp", "parallelism.zeroStage@distributed_type", "zeroStage 3", convert=lambda value: "FSDP"),
    differs("use_deepspeed", "", "always DeepSpeed ZeRO"),
    differs("cpu", "device.type@use_cpu", "device.type: cpu"),
    left("dynamo_backend", "models are not compiled", "no"),
    left("use_megatron_lm", "Megatron's parallelism is not supported: use zeroStage 3", False),
    left("tpu", "TPUs are not supported", False),
    differs("nproc_per_node num_gpus", "trainer.groups@per_node", "GPUs of a pod: trainer.groups[].gpus",
        convert=_gpus),
    differs("nnodes num_nodes", "trainer.groups@nodes", "pods: trainer.groups[].replicas"),
    not_needed("module no_python quiet num_cpu_threads_per_process tee log_dir role rdzv_conf max_restarts "
        "monitor_interval rdzv_endpoint rdzv_id standalone node_rank master_addr master_port hostfile include exclude",
        _OPERATOR),
)
