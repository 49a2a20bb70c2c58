"""verl's options: hydra's overrides of `verl.trainer.main_ppo`, by dotted path; what starts with one of PREFIXES has that row."""

from __future__ import annotations

from grpo_cli.convert import values as v
from grpo_cli.convert.rows import Row, Table, differs, left, not_needed, same

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_INSIDE = "settings of verl's inside"
_LOGS = "curves are in metrics.jsonl and at /metrics (docs/metrics.md)"
_EVAL = "a job trains only: evaluate its checkpoints"
_COLUMNS = "rows of verl's parquet need a function: see docs/convert.md"
_MEGATRON = "Megatron's parallelism does not exist here: zeroStage 3"
_AGGREGATION = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


def _under(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


DATA: list[Row] = [
    *differs("data.train_files", "dataset.path, which must be there in the container; " + _COLUMNS, v.names, fact="verl_files"),
    *not_needed(_under("data", "val_files val_batch_size validation_shuffle"), _EVAL),
    *differs(
        "data.train_batch_size",
        "prompts sampled at a time; a job samples those of one optimizer step (ppo_mini_batch_size) at a time",
        v.positive,
        fact="verl_batch",
        default=1024,
    ),
    *differs(
        "data.max_prompt_length",
        "prompts are not cut: maxModelLen holds the longest prompt and its completion",
        v.integer,
        fact="prompt",
        default=512,
    ),
    *same("data.max_response_length", "training.maxCompletionLength", v.integer, default=512),
    *left("data.prompt_key", _COLUMNS, "prompt"),
    *left("data.reward_fn_key", _COLUMNS, "data_source"),
    *left("data.shuffle", "rows are always shuffled, by training.seed", True),
    *differs("data.seed", "also the seed of sampling", v.integer, to="training.seed"),
    *left("data.truncation", "a prompt that leaves no room for its completion is an error that names the row", "error"),
    *not_needed(_under("data", "filter_overlong_prompts filter_overlong_prompts_workers"), "such a row is an error that names it"),
    *differs("data.dataloader_num_workers", "processes that prepare prompts ahead", v.integer, to="dataset.dataloaderNumWorkers"),
    *not_needed(_under("data", "return_raw_input_ids return_raw_chat return_full_prompt tokenizer use_shm"), _INSIDE),
    *left(
        _under("data", "image_key video_key return_multi_modal_inputs"), "text models alone are trained", "images", "videos", True, False
    ),
    *left("data.custom_cls data.apply_chat_template_kwargs", _COLUMNS),
    *left("data.gen_batch_size", "prompts are not filtered after sampling"),
    *left("data.trust_remote_code", "code of model repositories is not run", False),
]

ACTOR: list[Row] = [
    *same(f"{_MODEL}.path", "model.name", v.word),
    *same(f"{_MODEL}.enable_gradient_checkpointing", "parallelism.gradientCheckpointing", v.boolean, default=True),
    *left(f"{_MODEL}.use_remove_padding", "always so: sequences are packed", True, False),
    *same(f"{_MODEL}.enable_activation_offload", "parallelism.offloadActivations", v.boolean),
    *differs(f"{_MODEL}.use_liger", "Liger's kernels are on where they know the model", v.boolean, to="model.useLigerKernel"),
    *differs(_under(_MODEL, "lora_rank lora.rank"), "0 leaves the section lora out", v.integer, fact="lora_rank"),
    *same(_under(_MODEL, "lora_alpha lora.alpha"), "lora.alpha", v.number, default=16),
    *differs(f"{_MODEL}.target_modules", "all-linear unless named", v.target_modules, to="lora.targetModules"),
    *left(f"{_MODEL}.exclude_modules", "name the modules in lora.targetModules"),
    *left(f"{_MODEL}.trust_remote_code", "code of model repositories is not run", False),
    *not_needed(_under(_MODEL, "use_shm use_fused_kernels external_lib"), _INSIDE),
    *left(f"{_ACTOR}.strategy", "DeepSpeed ZeRO trains: zeroStage 3 shards as FSDP does", "fsdp", "fsdp2"),
    *differs(
        f"{_ACTOR}.ppo_mini_batch_size",
        "prompts of one optimizer step: training.promptsPerStep",
        v.positive,
        fact="verl_mini_batch",
        default=256,
    ),
    *not_needed(
        _under(_ACTOR, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz"),
        "micro-batches are cut by tokens: training.maxTokensPerMicroBatch",
    ),
    *differs(
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        "tokens of one micro-batch",
        v.integer,
        to="training.maxTokensPerMicroBatch",
    ),
    *left(f"{_ACTOR}.ppo_epochs", "every batch is used for one optimizer step", 1),
    *same(f"{_ACTOR}.clip_ratio_low", "training.epsilon", v.number),
    *same(f"{_ACTOR}.clip_ratio_high", "training.epsilonHigh", v.number),
    *differs(f"{_ACTOR}.clip_ratio", "epsilon, unless clip_ratio_low", v.number, fact="clip_ratio"),
    *left(f"{_ACTOR}.clip_ratio_c", "dual clipping does not exist here: ratios of negative advantages are not bounded"),
    *same(
        f"{_ACTOR}.loss_agg_mode",
        "training.lossType",
        v.one_of(_AGGREGATION, "the aggregation {value} does not exist here: dapo (token-mean) is taken"),
        default="token-mean",
    ),
    *left(f"{_ACTOR}.policy_loss.loss_mode", "the loss is PPO's clipped one, by tokens", "vanilla"),
    *left(f"{_ACTOR}.entropy_coeff", "such a term of the loss does not exist here", 0),
    *differs(f"{_ACTOR}.use_kl_loss", "beta is kl_loss_coef with it, 0 without", v.boolean, fact="use_kl_loss", default=False),
    *differs(f"{_ACTOR}.kl_loss_coef", "training.beta", v.number, fact="kl_coef"),
    *left(f"{_ACTOR}.kl_loss_type", "the divergence is k3, its gradient corrected", "low_var_kl", "k3", "low_var_kl+", "k3+"),
    *same(_under(_ACTOR, "grad_clip optim.clip_grad"), "training.maxGradNorm", v.number),
    *same(f"{_ACTOR}.optim.lr", "training.learningRate", v.number),
    *differs(f"{_ACTOR}.optim.lr_warmup_steps", "negative means that the ratio decides", v.number, fact="warmup"),
    *differs(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "a share of maxSteps", v.number, fact="warmup_ratio"),
    *same(_under(_ACTOR, "optim.lr_scheduler_type optim.warmup_style"), "training.lrSchedulerType", v.scheduler, default="constant"),
    *same(f"{_ACTOR}.optim.weight_decay", "training.weightDecay", v.number, default=0.01),
    *left(_under(_ACTOR, "optim.min_lr_ratio optim.num_cycles"), "schedules have no settings of their own", 0, 0.5),
    *differs(f"{_ACTOR}.fsdp_config.optimizer_offload", "parallelism.offloadOptimizer: generating", v.boolean, fact="offload_generating"),
    *left(f"{_ACTOR}.fsdp_config.param_offload", "weights stay on the GPUs, partitioned: zeroStage 3", False),
    *not_needed(f"{_ACTOR}.fsdp_config", "DeepSpeed ZeRO stage 3 shards as FSDP does"),
    *left(f"{_ACTOR}.ulysses_sequence_parallel_size", "a sequence is on one rank", 1),
    *left(f"{_ACTOR}.megatron", _MEGATRON),
    *not_needed(_under(_ACTOR, "shuffle use_torch_compile checkpoint data_loader_seed use_fused_kernels profiler"), _INSIDE),
    *not_needed("actor_rollout_ref.ref", "reference log-probabilities are taken in the training step's own batches"),
    *not_needed("actor_rollout_ref.hybrid_engine", "generation.topology says where vLLM runs: Colocate is this"),
]

ROLLOUT: list[Row] = [
    *left(f"{_ROLLOUT}.name", "vLLM samples", "vllm"),
    *same(f"{_ROLLOUT}.n", "training.numGenerations", v.positive),
    *same(f"{_ROLLOUT}.temperature", "training.temperature", v.number),
    *same(f"{_ROLLOUT}.top_p", "training.topP", v.number),
    *same(f"{_ROLLOUT}.top_k", "training.topK", v.top_k),
    *same(f"{_ROLLOUT}.tensor_model_parallel_size", "generation.tensorParallel", v.integer, default=2),
    *same(f"{_ROLLOUT}.gpu_memory_utilization", "generation.gpuMemoryUtilization", v.share, default=0.5),
    *same(f"{_ROLLOUT}.max_model_len", "generation.maxModelLen", v.integer),
    *differs(f"{_ROLLOUT}.dtype", "the type of the weights on both sides", v.dtype, fact="dtype"),
    *differs(f"{_ROLLOUT}.enforce_eager", "an argument of vLLM's own", v.boolean, to="generation.engineArgs.enforce_eager"),
    *differs(
        f"{_ROLLOUT}.max_num_batched_tokens", "an argument of vLLM's own", v.integer, to="generation.engineArgs.max_num_batched_tokens"
    ),
    *differs(f"{_ROLLOUT}.max_num_seqs", "an argument of vLLM's own", v.integer, to="generation.engineArgs.max_num_seqs"),
    *differs(
        f"{_ROLLOUT}.enable_chunked_prefill", "an argument of vLLM's own", v.boolean, to="generation.engineArgs.enable_chunked_prefill"
    ),
    *differs(f"{_ROLLOUT}.free_cache_engine", "sleepLevel 2, or 0 for False", v.boolean, fact="sleep"),
    *left(f"{_ROLLOUT}.multi_turn", "completions of one turn: tools do not exist here", False),
    *left(f"{_ROLLOUT}.do_sample", "completions are sampled", True),
    *left(f"{_ROLLOUT}.ignore_eos", "completions end where the model ends them", False),
    *left(_under(_ROLLOUT, "data_parallel_size expert_parallel_size pipeline_model_parallel_size"), "engines are tensor-parallel alone", 1),
    *not_needed(
        _under(
            _ROLLOUT,
            "mode load_format layered_summon calculate_log_probs disable_log_stats val_kwargs agent engine_kwargs trace profiler "
            "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu "
            "update_weights_bucket_megabytes skip_rollout cudagraph_capture_sizes multi_stage_wake_up prompt_length response_length",
        ),
        _INSIDE,
    ),
]

REST: list[Row] = [
    *left("algorithm.adv_estimator", "advantages are of the group: grpo", "grpo"),
    *differs("algorithm.norm_adv_by_std_in_grpo", "scaleRewards: group, or none", v.boolean, fact="norm_by_std"),
    *left("algorithm.use_kl_in_reward", "the divergence is a term of the loss: training.beta", False),
    *not_needed("algorithm.kl_ctrl algorithm.kl_penalty", "settings of use_kl_in_reward alone"),
    *not_needed("algorithm.gamma algorithm.lam critic", "of estimators with a critic"),
    *left("algorithm.filter_groups", "groups of equal rewards are left out of training, and not sampled anew", False),
    *left("algorithm.rollout_correction", "set training.importanceSamplingCorrection (docs/training.md)"),
    *differs("custom_reward_function.path", "a file becomes a module: put it on PYTHONPATH in the image", v.word, fact="reward_file"),
    *differs("custom_reward_function.name", "the function of that module", v.word, fact="reward_function"),
    *left("reward_model reward", "write the reward as a function (docs/rewards.md)", "naive", False),
    *differs("trainer.n_gpus_per_node", "GPUs of a pod: trainer.groups[].gpus", v.positive, fact="per_node", default=8),
    *differs("trainer.nnodes", "pods: trainer.groups[].replicas", v.positive, fact="nodes"),
    *differs("trainer.total_epochs", "maxSteps = epochs x rows / promptsPerStep", v.number, fact="epochs", default=30),
    *differs(
        "trainer.total_training_steps",
        "optimizer steps: total_training_steps x train_batch_size / ppo_mini_batch_size",
        v.integer,
        fact="verl_steps",
    ),
    *differs("trainer.save_freq", "storage.checkpointEverySteps; -1 saves at the end alone here too", v.number, fact="save_steps"),
    *same(_under("trainer", "max_actor_ckpt_to_keep"), "storage.keep", v.integer),
    *left("trainer.resume_mode", "a job that is restarted goes on from its checkpoint", "auto"),
    *left("trainer.resume_from_path", "of this operator's runs alone: storage.resumeFrom"),
    *not_needed(_under("trainer", "test_freq val_before_train val_only log_val_generations validation_data_dir"), _EVAL),
    *differs(
        "trainer.logger",
        "tensorboard, wandb and mlflow; their credentials are named in podTemplate.envFrom",
        v.trackers,
        to="training.reportTo",
    ),
    *same("trainer.experiment_name", "training.runName"),
    *differs("trainer.project_name", "wandb's project, mlflow's experiment", v.word, to="training.project"),
    *not_needed(_under("trainer", "rollout_data_dir"), _LOGS),
    *differs("trainer.default_local_dir", "checkpoints go to the volume that storage.claimName names; without one they go with the pod"),
    *not_needed(
        _under(
            "trainer",
            "critic_warmup balance_batch default_hdfs_dir del_local_ckpt_after_load ray_wait_register_center_timeout device "
            "max_critic_ckpt_to_keep use_legacy_worker_impl esi_redundant_time",
        ),
        _INSIDE,
    ),
    *not_needed("ray_kwargs ray_init global_profiler hydra", "no Ray and no hydra: the operator starts every rank"),
    *not_needed("config-path config-name", "verl's defaults are in this table; pass what your file changes as overrides"),
    *not_needed("CUDA_VISIBLE_DEVICES MASTER_PORT MASTER_ADDR", "the operator gives every rank its place"),
]

VERL = Table.of("verl", "0.7.0", DATA, ACTOR, ROLLOUT, REST)
