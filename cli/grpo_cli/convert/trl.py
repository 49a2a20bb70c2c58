"""TRL's options: `GRPOConfig` (with transformers' `TrainingArguments`), `ModelConfig`, the script's own, and those of older releases.

Checked against the installed TRL by a test: each of its fields has a row.
"""

from __future__ import annotations

from grpo_cli.convert import values as v
from grpo_cli.convert.rows import Row, Table, differs, left, not_needed, same

_NO_EVAL = "a job trains only: evaluate its checkpoints"
_LOSS = "such a term of the loss does not exist here"
_LOGS = "every step is in metrics.jsonl, ranks.jsonl and completions.jsonl (docs/metrics.md)"
_HUB = "nothing is pushed to a hub: take step-N/model of the storage"
_PACKED = "sequences are packed, and a step is cut by tokens (docs/training.md)"
_ADDRESS = "the operator starts vLLM and hands out addresses and ports"
_TOKENS_BATCH = (
    "a step is promptsPerStep x numGenerations completions over all ranks: per_device_train_batch_size x ranks x "
    "gradient_accumulation_steps / num_generations prompts"
)
_ONE_STEP = "every batch is used for one optimizer step: the batch of a step is kept, and each step samples anew"

MODEL: list[Row] = [
    *same("model_name_or_path", "model.name", v.word),
    *same("model_revision", "model.revision"),
    *differs(
        "dtype torch_dtype",
        "the type of weights in training and generation; masters of the optimizer are float32 (parallelism.optimizerDtype)",
        v.dtype,
        fact="dtype",
    ),
    *differs("attn_implementation", "varlen is PyTorch's own kernel for packed sequences", v.attention, to="model.attention"),
    *differs("model_init_kwargs", "its keys are read as options"),
    *left("trust_remote_code", "code of model repositories is not run: a model of transformers itself would do", False),
    *differs("use_peft", "the section lora is there or not", v.boolean, fact="use_lora"),
    *same("lora_r", "lora.r", v.integer),
    *same("lora_alpha", "lora.alpha", v.number),
    *same("lora_dropout", "lora.dropout", v.number, default=0.05),
    *differs(
        "lora_target_modules",
        "all-linear unless named; peft would choose by the model's type",
        v.target_modules,
        to="lora.targetModules",
    ),
    *same("lora_modules_to_save", "lora.modulesToSave", v.texts),
    *left("lora_target_parameters", "adapters are of modules: name linear layers in lora.targetModules", "[]"),
    *not_needed("lora_task_type", "a job trains language models"),
    *left("use_rslora", "adapters are scaled by alpha / r: give lora.alpha x sqrt(r)", False),
    *left("use_dora", "DoRA does not exist here: plain LoRA is trained", False),
    *left("load_in_8bit load_in_4bit", "weights are not quantized in training: use lora, zeroStage 3 or offloadOptimizer", False),
    *not_needed("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", "settings of load_in_4bit alone"),
]

DATA: list[Row] = [
    *differs("dataset_name", "a folder or file becomes dataset.path, which must be there in the container", v.word, fact="dataset"),
    *same("dataset_config", "dataset.config"),
    *same("dataset_train_split", "dataset.split"),
    *not_needed("dataset_test_split", _NO_EVAL),
    *left("dataset_streaming streaming", "datasets are not streamed: download to a volume (cache.claimName)", False),
    *left("datasets", "mixtures do not exist here: write the mixture to a file and name it in dataset.path", "[]"),
    *left("test_split_size", "no rows are kept back for evaluation: split the dataset before"),
    *left("ignore_bias_buffers", "a setting of DDP's", False),
    *left("shuffle_dataset", "rows are always shuffled, by training.seed", True),
    *differs("reward_funcs", "one reward each; a dotted path becomes module:function", v.texts, fact="rewards"),
    *left("reward_model_name_or_path", "reward models do not exist here: call one that is served from a function (docs/rewards.md)"),
    *differs("reward_weights", "rewards[].weight", v.texts, fact="reward_weights"),
    *differs(
        "dataloader_num_workers",
        "processes that prepare prompts ahead of their step; 0 waits",
        v.integer,
        to="dataset.dataloaderNumWorkers",
    ),
]

BATCH: list[Row] = [
    *same("num_generations", "training.numGenerations", v.positive),
    *differs("per_device_train_batch_size", _TOKENS_BATCH, v.positive, fact="per_device", default=8),
    *differs("gradient_accumulation_steps", _TOKENS_BATCH, v.positive, fact="accumulation"),
    *differs("generation_batch_size steps_per_generation", _ONE_STEP),
    *left("num_iterations", _ONE_STEP, 1),
    *differs("max_steps", "-1 means that num_train_epochs decides", v.integer, fact="max_steps"),
    *differs("num_train_epochs", "maxSteps = epochs x rows / promptsPerStep", v.number, fact="epochs", default=3.0),
    *same("max_completion_length", "training.maxCompletionLength", v.integer, default=512),
    *left("auto_find_batch_size", "use training.maxTokensPerMicroBatch, which bounds memory", False),
    *not_needed("average_tokens_across_devices", "always so"),
    *not_needed("pad_to_multiple_of dataloader_drop_last train_sampling_strategy length_column_name group_by_length", _PACKED),
]

OPTIMIZER: list[Row] = [
    *same("learning_rate", "training.learningRate", v.number),
    *same("lr_scheduler_type", "training.lrSchedulerType", v.scheduler),
    *left("lr_scheduler_kwargs", "schedules have no settings of their own: warmupSteps alone", "{}"),
    *differs("warmup_steps", "below 1 it is a share of maxSteps", v.number, fact="warmup"),
    *differs("warmup_ratio", "a share of maxSteps", v.number, fact="warmup_ratio"),
    *same("weight_decay", "training.weightDecay", v.number),
    *same("max_grad_norm", "training.maxGradNorm", v.number),
    *left("optim", "the optimizer is AdamW", "adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "adamw"),
    *left("optim_args optim_target_modules", "AdamW has no further settings"),
    *left("adam_beta1", "betas are AdamW's 0.9 and 0.999", 0.9),
    *left("adam_beta2", "betas are AdamW's 0.9 and 0.999", 0.999),
    *left("adam_epsilon", "AdamW's epsilon is 1e-8", 1e-8),
    *left("label_smoothing_factor", _LOSS, 0),
    *left("neftune_noise_alpha", "noise in embeddings does not exist here"),
    *same("seed", "training.seed", v.integer),
    *left("data_seed", "data order follows training.seed"),
    *left("full_determinism", "draws are repeatable, kernels need not be (docs/journal.md)", False),
    *differs("bf16", "the type of weights; masters are float32", v.boolean, fact="bf16"),
    *differs("fp16", "the type of weights; masters are float32, and the loss is scaled", v.boolean, fact="fp16"),
    *left("tf32", "products in float32 are as PyTorch sets them"),
    *left("torch_compile", "models are not compiled: Liger's kernels and packed attention are on by default", False),
    *not_needed("torch_compile_backend torch_compile_mode", "settings of torch_compile alone"),
    *same("use_liger_kernel", "model.useLigerKernel", v.boolean),
    *left("liger_kernel_config", "Liger's kernels are chosen by the model's type"),
    *same("gradient_checkpointing", "parallelism.gradientCheckpointing", v.boolean, default=True),
    *not_needed("gradient_checkpointing_kwargs use_cache torch_empty_cache_steps", "settings of the trainer's inside"),
    *differs("deepspeed", "its stage and whether the optimizer is offloaded; the rest is set by the job", v.deepspeed, fact="deepspeed"),
    *differs("fsdp", "DeepSpeed ZeRO shards instead: full_shard is stage 3, shard_grad_op 2", v.fsdp, fact="fsdp"),
    *differs("fsdp_config", "DeepSpeed ZeRO shards instead: see fsdp"),
    *left("parallelism_config", "ranks share data alone: use zeroStage 3 for models that do not fit"),
    *left("accelerator_config", "accelerate is set up by the job", "{}"),
    *differs("use_cpu no_cuda", "device.type: cpu", v.boolean, fact="use_cpu"),
    *not_needed(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank debug "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order remove_unused_columns label_names ds3_gather_for_generation",
        "settings of the trainer's inside",
    ),
    *not_needed("ddp_timeout", "ranks that wait for each other give up after rendezvous.timeoutSeconds, naming the one that is missing"),
    *left("disable_dropout", "dropout is as the model's configuration says", False),
    *left("cast_lm_head_to_fp32", "logits are made in model.dtype, and their log-probabilities in float32", False),
    *left("router_aux_loss_coef", _LOSS, 0),
]

LOSS: list[Row] = [
    *same("loss_type", "training.lossType", v.loss_type),
    *same("epsilon", "training.epsilon", v.number),
    *same("epsilon_high", "training.epsilonHigh", v.number),
    *left("delta", "two-sided clipping does not exist here"),
    *same("beta", "training.beta", v.number),
    *left("use_bias_correction_kl", "the divergence's gradient is always corrected", True),
    *left("importance_sampling_level", "ratios of the loss are of tokens (GSPO does not exist here)", "token"),
    *same("scale_rewards", "training.scaleRewards", v.scale_rewards),
    *left("multi_objective_aggregation", "rewards are summed, then normalised", "sum_then_normalize"),
    *same("mask_truncated_completions", "training.maskTruncatedCompletions", v.boolean),
    *left("sync_ref_model", "the reference is the initial model, always", False),
    *not_needed("ref_model_mixup_alpha ref_model_sync_steps", "settings of sync_ref_model alone"),
    *left("top_entropy_quantile", _LOSS, 1.0),
    *left("entropy_coef", _LOSS, 0.0),
    *left("use_adaptive_entropy", _LOSS, False),
    *not_needed("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", "settings of use_adaptive_entropy alone"),
    *not_needed("sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "of other losses"),
    *left("off_policy_mask_threshold", "mask by training.importanceSamplingCorrection instead"),
    *differs("vllm_importance_sampling_correction", "False is importanceSamplingCorrection: none", v.boolean, fact="correct_importance"),
    *same("vllm_importance_sampling_mode", "training.importanceSamplingCorrection", v.correction),
    *same("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "training.importanceSamplingClipMax", v.number),
    *same("vllm_importance_sampling_clip_min", "training.importanceSamplingClipMin", v.number),
]

GENERATION: list[Row] = [
    *same("temperature", "training.temperature", v.number),
    *same("top_p", "training.topP", v.number),
    *same("top_k", "training.topK", v.top_k),
    *left("min_p", "sampling has topP and topK", 0),
    *left("repetition_penalty", "a penalty would part the samples from the policy that is trained: leave it out", 1.0),
    *left("generation_kwargs", "sampling has temperature, topP and topK", "{}"),
    *left("chat_template_kwargs", "the chat template gets no arguments: set it in the tokenizer of model.path", "{}"),
    *left("max_tool_calling_iterations", "completions of one turn: tools do not exist here"),
    *differs("use_vllm", "vLLM samples unless generation.engine is Transformers, for debugging", v.boolean, fact="use_vllm", default=False),
    *differs("vllm_mode", "generation.topology: colocate is Colocate, server is Server (docs/topologies.md)", fact="vllm_mode"),
    *differs("vllm_enable_sleep_mode", "true is sleepLevel 2, which is the default here; false is 0", v.boolean, fact="sleep"),
    *differs("vllm_model_impl", "generation.engineArgs.model_impl", to="generation.engineArgs.model_impl"),
    *left("vllm_structured_outputs_regex vllm_guided_decoding_regex", "sampling is not constrained: score the format by a reward"),
    *not_needed("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", _ADDRESS),
    *same("vllm_gpu_memory_utilization", "generation.gpuMemoryUtilization", v.share),
    *same("vllm_max_model_length vllm_max_model_len", "generation.maxModelLen", v.integer),
    *same("vllm_tensor_parallel_size", "generation.tensorParallel", v.integer),
    *not_needed("cache_implementation", "of generation by transformers alone"),
    *not_needed("use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged", "vLLM batches"),
]

SAVING: list[Row] = [
    *differs("save_steps", "below 1 it is a share of maxSteps", v.number, fact="save_steps", default=500),
    *left("save_strategy", "checkpoints are written every checkpointEverySteps steps, and at the end", "steps"),
    *same("save_total_limit", "storage.keep", v.integer),
    *left("save_only_model", "a checkpoint holds all that a restart needs; step-N/model is the model alone", False),
    *left("save_on_each_node", "checkpoints lie on one volume that all pods share", False),
    *not_needed("enable_jit_checkpoint", "SIGTERM always saves"),
    *left("resume_from_checkpoint", "of this operator's runs alone: storage.resumeFrom; else put the model into model.path", False),
    *not_needed("overwrite_output_dir ignore_data_skip restore_callback_states_from_checkpoint", "each job has a folder of its own"),
    *differs("output_dir", "checkpoints go to the volume that storage.claimName names; without one they go with the pod"),
    *left("push_to_hub", _HUB, False),
    *not_needed("hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision hub_model_revision", _HUB),
    *differs(
        "report_to",
        "tensorboard, wandb and mlflow; their credentials are named in podTemplate.envFrom",
        v.trackers,
        to="training.reportTo",
    ),
    *same("run_name", "training.runName"),
    *differs("project wandb_project", "wandb's project, mlflow's experiment", v.word, to="training.project"),
    *not_needed("trackio_space_id trackio_bucket_id trackio_static_space_id wandb_entity", _LOGS),
    *not_needed(
        "logging_strategy logging_steps logging_first_step logging_dir log_on_each_node logging_nan_inf_filter log_level log_level_replica "
        "disable_tqdm include_num_input_tokens_seen log_completions log_multimodal num_completions_to_print log_unique_prompts "
        "skip_memory_metrics",
        _LOGS,
    ),
    *left("log_completions_hub_repo", _HUB),
    *left("eval_strategy", _NO_EVAL, "no", False),
    *left("do_eval do_predict load_best_model_at_end eval_on_start", _NO_EVAL, False),
    *not_needed(
        "do_train eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics metric_for_best_model greater_is_better bf16_full_eval "
        "fp16_full_eval num_generations_eval",
        _NO_EVAL,
    ),
]

OLDER: list[Row] = [
    *differs("max_prompt_length", "prompts are not cut: maxModelLen holds the longest prompt and its completion", v.integer, fact="prompt"),
    *differs("vllm_device", "topology NodeLocal: vLLM has the last GPU of every node for itself", fact="vllm_device"),
    *differs("dataset_configs", "the first is dataset.config", v.names, fact="dataset_configs"),
    *same("system_prompt", "dataset.systemPrompt"),
    *left("chat_template", "the tokenizer's own is used: save the model with this one and name it in model.path"),
    *left("dataset_prompt_column", "rows need the column prompt: rename it in a function (dataset.preprocess, docs/datasets.md)", "prompt"),
]

TRL = Table.of("trl", "1.16.0", MODEL, DATA, BATCH, OPTIMIZER, LOSS, GENERATION, SAVING, OLDER)
