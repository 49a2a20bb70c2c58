"""ms-swift's options (`swift rlhf --rlhf_type grpo`, `swift rollout`): TRL's, but for what has another name, default or meaning."""

from __future__ import annotations

from grpo_cli.convert import trl
from grpo_cli.convert import values as v
from grpo_cli.convert.rows import Row, Table, differs, left, not_needed, same

_TURNS = "completions of one turn: tools and environments do not exist here"
_REWARD = "write the reward as a function (docs/rewards.md)"
_IMAGES = "text models alone are trained"
_LENGTHS = "prompts are not cut: maxModelLen holds the longest prompt and its completion"
_INSIDE = "settings of ms-swift's inside"
_TEMPLATE = "the tokenizer's own chat template is used"
_IN_TURNS = "with Colocate, engine and trainer take turns (colocate.sleepLevel); weights of the trainer stay"

OWN: list[Row] = [
    *left("rlhf_type", "a job trains with GRPO", "grpo"),
    *differs(
        "model", "ms-swift loads from ModelScope unless --use_hf: the name must be one of the Hugging Face hub", v.word, to="model.name"
    ),
    *same("model_revision", "model.revision"),
    *differs("torch_dtype", "masters of the optimizer are float32 (parallelism.optimizerDtype)", v.dtype, fact="dtype"),
    *differs("attn_impl", "varlen is PyTorch's own kernel for packed sequences", v.attention, to="model.attention"),
    *differs(
        "tuner_type train_type sft_type",
        "lora becomes the section lora, full leaves it out",
        v.one_of({"lora": True, "full": False}, "{value} does not exist here: lora or full; full is taken"),
        fact="use_lora",
        default="lora",
    ),
    *same("lora_rank", "lora.r", v.integer, default=8),
    *same("lora_alpha", "lora.alpha", v.number, default=32),
    *same("lora_dropout", "lora.dropout", v.number, default=0.05),
    *differs("target_modules", "all-linear unless named", v.target_modules, to="lora.targetModules"),
    *same("modules_to_save", "lora.modulesToSave", v.texts),
    *left("use_rslora use_dora", "adapters are plain LoRA, scaled by alpha / r", False),
    *left("adapters ref_adapters", "training begins without adapters: merge them into the model of model.path", "[]"),
    *left("ref_model", "the reference is the initial model"),
    *left("quant_method quant_bits", "weights are not quantized in training: use zeroStage 3 or offloadOptimizer"),
    *not_needed("bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant", "settings of quant_method alone"),
    *differs("dataset", "name#N is split train[:N]; columns as TRL's: dataset.preprocess makes `prompt`", v.names, fact="swift_dataset"),
    *not_needed("val_dataset split_dataset_ratio val_dataset_shuffle cached_val_dataset", "a job trains only: evaluate its checkpoints"),
    *left("cached_dataset", "rows are tokenized as their step nears: name the dataset itself", "[]"),
    *left("dataset_shuffle train_dataloader_shuffle", "rows are always shuffled, by training.seed", True),
    *not_needed("dataset_num_proc load_from_cache_file download_mode strict columns remove_unused_columns lazy_tokenize", _INSIDE),
    *not_needed("use_hf", "names are the Hugging Face hub's"),
    *left("external_plugins custom_register_path custom_dataset_info", _REWARD, "[]"),
    *differs("system", "dataset.systemPrompt; a .txt file is read by nobody here: paste its text", fact="system"),
    *left("template template_type enable_thinking", _TEMPLATE),
    *left("loss_scale", "every token of a completion counts alike", "default", "last_round"),
    *left("truncation_strategy", _LENGTHS),
    *differs("max_length", _LENGTHS, v.integer, fact="prompt"),
    *differs("reward_funcs", "accuracy is accuracy: {}; others become functions", v.texts, fact="rewards"),
    *left("reward_model reward_model_plugin reward_adapters", _REWARD, "[]"),
    *left(
        "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct "
        "cosine_max_len repetition_n_grams repetition_max_penalty soft_max_length soft_cache_length",
        _REWARD,
    ),
    *differs("deepspeed", "zero2 is zeroStage: 2, zero3_offload also offloadOptimizer: cpu", v.deepspeed, fact="deepspeed"),
    *same("learning_rate", "training.learningRate", v.number),
    *same("lr_scheduler_type", "training.lrSchedulerType", v.scheduler, default="cosine"),
    *same("weight_decay", "training.weightDecay", v.number, default=0.1),
    *left("adam_beta2", "betas are AdamW's 0.9 and 0.999", 0.999),
    *differs("per_device_train_batch_size", trl._TOKENS_BATCH, v.positive, fact="per_device", default=1),
    *same("beta", "training.beta", v.number, default=0.04),
    *same("loss_type", "training.lossType", v.loss_type, default="grpo"),
    *same("temperature", "training.temperature", v.number, default=0.9),
    *same("top_p", "training.topP", v.number),
    *same("top_k", "training.topK", v.top_k),
    *left("stop_words", "completions end at the tokenizer's end of sequence", "[]"),
    *same("overlong_filter", "training.maskTruncatedCompletions", v.boolean),
    *left("dynamic_sample", "groups of equal rewards are left out of training, and not sampled anew (docs/training.md)", False),
    *not_needed("max_resample_times", "a setting of dynamic_sample alone"),
    *left("advantage_estimator", "advantages are of the group", "grpo"),
    *left("kl_in_reward", "the divergence is a term of the loss: training.beta", False),
    *same(
        "rollout_importance_sampling_mode",
        "training.importanceSamplingCorrection",
        lambda value: "none" if v.is_none(value) else v.correction(value),
        default="none",
    ),
    *same("rollout_importance_sampling_threshold", "training.importanceSamplingClipMax", v.number),
    *not_needed("log_entropy log_rollout_offpolicy_metrics wandb_log_unique_prompts", trl._LOGS),
    *not_needed("tau_pos tau_neg", "of other losses"),
    *left("multi_turn_scheduler max_turns use_gym_env gym_env vllm_server_pass_dataset agent_template", _TURNS, False),
    *not_needed("completion_length_limit_scope", _TURNS),
    *left("async_generate", "sampling waits for the newest weights: every batch is on policy", False),
    *same("sleep_level", "generation.colocate.sleepLevel", v.integer, default=0),
    *left("offload_model", _IN_TURNS, False),
    *differs("offload_optimizer", "parallelism.offloadOptimizer: generating", v.boolean, fact="offload_generating"),
    *not_needed("move_model_batches enable_flattened_weight_sync", "weights are pushed in buckets"),
    *not_needed("vllm_server_group_port", trl._ADDRESS),
    *left("num_infer_workers", "use generation.nodeLocal: enginesPerNode is what this was"),
    *left("use_lmdeploy infer_backend", "vLLM samples", False, "vllm"),
    *differs("vllm_enforce_eager", "an argument of vLLM's own", v.boolean, to="generation.engineArgs.enforce_eager"),
    *differs("vllm_max_num_seqs", "an argument of vLLM's own", v.integer, to="generation.engineArgs.max_num_seqs"),
    *differs("vllm_enable_prefix_caching", "an argument of vLLM's own", v.boolean, to="generation.engineArgs.enable_prefix_caching"),
    *not_needed("vllm_enable_lora vllm_max_lora_rank", "engines of their own get adapters alone with lora.push: adapters (docs/lora.md)"),
    *left("vllm_limit_mm_per_prompt", _IMAGES),
    *left("vllm_pipeline_parallel_size", "an engine spans the GPUs of one pod: tensorParallel", 1),
    *left("freeze_vit freeze_aligner freeze_llm", _IMAGES, True, False),
    *left("sequence_parallel_size", "a sequence is on one rank: gradientCheckpointing and zeroStage 3 save memory", 1),
    *left("padding_free packing use_logits_to_keep", "always so: sequences are packed, and logits made of completions", True, False),
    *not_needed(
        "add_version model_type seq_kd teacher_model acc_strategy save_safetensors logging_nan_inf_filter ignore_args_error", _INSIDE
    ),
]

ROLLOUT: list[Row] = [
    *differs(
        "rollout.vllm_tensor_parallel_size rollout.tensor_parallel_size",
        "generation.tensorParallel",
        v.integer,
        to="generation.tensorParallel",
    ),
    *differs(
        "rollout.vllm_data_parallel_size rollout.data_parallel_size",
        "a group of generation.server.groups has tensorParallel x this many GPUs",
        v.positive,
        fact="server_copies",
    ),
    *same("rollout.vllm_max_model_len rollout.max_model_len", "generation.maxModelLen", v.integer),
    *same("rollout.vllm_gpu_memory_utilization rollout.gpu_memory_utilization", "generation.gpuMemoryUtilization", v.share),
    *not_needed("rollout.model rollout.port rollout.host rollout.torch_dtype rollout.infer_backend rollout.use_hf", trl._ADDRESS),
    *left("rollout.multi_turn_scheduler rollout.max_turns rollout.external_plugins rollout.use_gym_env", _TURNS, False),
    *not_needed("rollout.vllm_use_async_engine rollout.use_async_engine rollout.vllm_enable_lora rollout.vllm_max_lora_rank", _INSIDE),
]

ENVIRONMENT: list[Row] = [
    *differs("NPROC_PER_NODE nproc_per_node", "GPUs of a pod: trainer.groups[].gpus", v.positive, fact="per_node"),
    *differs("NNODES nnodes", "pods: trainer.groups[].replicas", v.positive, fact="nodes"),
    *not_needed(
        "CUDA_VISIBLE_DEVICES NODE_RANK node_rank master_addr master_port MASTER_ADDR MASTER_PORT RANK WORLD_SIZE",
        "the operator gives every rank its place",
    ),
    *not_needed("PYTHONPATH", "the image's; functions of your own: docs/rewards.md"),
    *left("MAX_PIXELS VIDEO_MAX_PIXELS FPS_MAX_FRAMES", _IMAGES),
]

_own = {row.name for row in OWN}
_shared = [trl.BATCH, trl.OPTIMIZER, trl.LOSS, trl.GENERATION, trl.SAVING, trl.DATA]
_inherited = [row for part in _shared for row in part if row.name not in _own and not row.name.startswith("dataset_")]

SWIFT = Table.of("ms-swift", "4.5.2", OWN, ROLLOUT, ENVIRONMENT, _inherited)
