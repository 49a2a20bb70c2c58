"""TRL's options: `GRPOConfig` (with transformers' `TrainingArguments`), `ModelConfig`, `trl grpo`, and older releases.

A test checks that each field of the installed TRL has a row.
"""

from __future__ import annotations

from grpo_cli.convert import values as v
from grpo_cli.convert.rows import Table, differs, fields, left, not_needed, rows, same, under

_EVAL_INSIDE = "an evaluation samples as training does (docs/evaluation.md)"
_LOSS = "this term of the loss is not supported"
LOGS = "every step is in metrics.jsonl, ranks.jsonl and completions.jsonl (docs/metrics.md)"
_HUB = "nothing is pushed to a hub: storage.export writes folders to upload"
_PACKED = "sequences are packed, and micro-batches cut by tokens (docs/training.md)"
ADDRESS = "the operator starts vLLM and assigns addresses and ports"
BATCH_SIZE = "per_device_train_batch_size x ranks x gradient_accumulation_steps / num_generations prompts per step"
EPOCHS = "maxSteps = epochs x rows x numIterations / promptsPerStep"
FOUR_BIT = "weights in 4 bits are NF4 with nested (double) quantization"
PENALISED = "the log-probabilities that are trained on are under it, too"
_TOGETHER = "training.stepsPerGeneration, in optimizer steps: micro-batches / gradient_accumulation_steps"

# fmt: off
DATA = rows(
    differs("dataset_name", "dataset@dataset", "a path becomes dataset.path, which must exist in the container"),
    same("dataset_config", "dataset.config"),
    same("dataset_train_split", "dataset.split"),
    differs("dataset_test_split", "evaluation.dataset.split@eval_split",
        "split of evaluation.dataset, if eval_strategy is not no"),
    left("dataset_streaming streaming", "datasets are downloaded, not streamed (cache.claimName keeps them)", False),
    left("datasets", "mixtures are not supported: write the mixture to a file and name it in dataset.path", "[]"),
    left("test_split_size", "no rows are kept for evaluation: split the dataset beforehand"),
    left("ignore_bias_buffers", "only DDP uses it", False),
    same("shuffle_dataset", "dataset.shuffle"),
    differs("reward_funcs", "rewards@rewards", "accuracy_reward and think_format_reward are built in"),
    left("reward_model_name_or_path", "serve it, and ask it with rewards[].judge or a function (docs/rewards.md)"),
    differs("reward_weights", "rewards@reward_weights", "rewards[].weight"),
    differs("dataloader_num_workers", "dataset.dataloaderNumWorkers",
        "processes that prepare prompts ahead of their step; 0: none"),
)

# Of ms-swift, too.
SHARED = rows(
    # Batch
    fields("training", "num_generations"),
    differs("per_device_train_batch_size", "training.promptsPerStep@per_device", BATCH_SIZE, default=8),
    differs("gradient_accumulation_steps", "training.promptsPerStep@accumulation", BATCH_SIZE),
    differs("steps_per_generation", "training.stepsPerGeneration@steps_per_generation", _TOGETHER),
    differs("generation_batch_size", "training.stepsPerGeneration@generation_batch", _TOGETHER),
    fields("training", "num_iterations"),
    differs("max_steps", "training.maxSteps@max_steps", "-1: num_train_epochs decides"),
    differs("num_train_epochs", "training.maxSteps@epochs", EPOCHS, default=3.0),
    same("max_completion_length", "training.maxCompletionLength", default=512),
    not_needed("auto_find_batch_size", "training.maxTokensPerMicroBatch: micro-batches are as large as memory allows"),
    not_needed("average_tokens_across_devices", "always so"),
    not_needed("pad_to_multiple_of dataloader_drop_last train_sampling_strategy length_column_name group_by_length",
        _PACKED),
    # Optimizer
    fields("training", "learning_rate lr_scheduler_type"),
    differs("lr_scheduler_kwargs", "training.lrSchedulerKwargs@schedule_arguments", "those that the schedule takes"),
    differs("warmup_steps", "training.warmupSteps@warmup", "below 1 it is a share of maxSteps"),
    differs("warmup_ratio", "training.warmupSteps@warmup_ratio", "a share of maxSteps"),
    fields("training", "weight_decay max_grad_norm"),
    left("optim", "the optimizer is AdamW; parallelism.optimizerDtype int8 has its moments in 8 bits",
        "adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "adamw"),
    left("optim_args optim_target_modules", "AdamW has no further settings"),
    fields("training", "adam_beta1 adam_beta2 adam_epsilon"),
    left("label_smoothing_factor", _LOSS, 0),
    left("neftune_noise_alpha", "noise in embeddings is not supported"),
    fields("training", "seed"),
    left("data_seed", "data order follows training.seed"),
    left("full_determinism", "random draws are repeatable, kernels need not be (docs/journal.md)", False),
    differs("bf16", "model.dtype@bf16", "type of the weights; master weights are float32"),
    differs("fp16", "model.dtype@fp16", "type of the weights; master weights are float32, and the loss is scaled"),
    left("tf32", "float32 matrix products have PyTorch's default precision"),
    left("torch_compile", "models are not compiled: Liger's kernels and packed attention are on by default", False),
    not_needed("torch_compile_backend torch_compile_mode", "only torch_compile uses it"),
    fields("model", "use_liger_kernel"),
    left("liger_kernel_config", "the model's type decides which Liger kernels are used"),
    same("gradient_checkpointing", "parallelism.gradientCheckpointing", default=True),
    not_needed("gradient_checkpointing_kwargs use_cache torch_empty_cache_steps", "internal to the trainer"),
    differs("deepspeed", "parallelism@deepspeed", "its stage and optimizer offloading; the job sets the rest"),
    differs("fsdp", "parallelism@fsdp", "DeepSpeed ZeRO shards instead: full_shard is stage 3, shard_grad_op 2"),
    differs("fsdp_config", "", "DeepSpeed ZeRO shards instead: see fsdp"),
    left("parallelism_config", "ranks are data-parallel only: use zeroStage 3 for models that do not fit"),
    left("accelerator_config", "the job configures accelerate", "{}"),
    differs("use_cpu no_cuda", "device.type@use_cpu", "device.type: cpu"),
    not_needed("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "local_rank debug dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names "
        "ds3_gather_for_generation", "internal to the trainer"),
    not_needed("ddp_timeout", "ranks stop waiting for a missing one after rendezvous.timeoutSeconds"),
    left("disable_dropout", "the model's configuration sets dropout", False),
    left("cast_lm_head_to_fp32", "logits have model.dtype, their log-probabilities float32", False),
    left("router_aux_loss_coef", _LOSS, 0),
    # Loss
    fields("training", "loss_type epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos beta"),
    left("use_bias_correction_kl", "the gradient of the KL term is always corrected", True),
    fields("training", "importance_sampling_level scale_rewards multi_objective_aggregation mask_truncated_completions "
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef"),
    left("use_adaptive_entropy", "training.entropyCoef stays as it is", False),
    not_needed("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", "only for use_adaptive_entropy"),
    not_needed("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "only other losses use it"),
    fields("training", "off_policy_mask_threshold"),
    differs("vllm_importance_sampling_correction", "training.importanceSamplingCorrection@correct_importance",
        "false is the correction none"),
    same("vllm_importance_sampling_mode", "training.importanceSamplingCorrection", default="sequence_mask"),
    same("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "training.importanceSamplingClipMax"),
    same("vllm_importance_sampling_clip_min", "training.importanceSamplingClipMin"),
    # Generation
    fields("training", "temperature top_p top_k min_p"),
    differs("repetition_penalty", "training.repetitionPenalty", PENALISED),
    differs("presence_penalty", "training.presencePenalty", PENALISED),
    differs("frequency_penalty", "training.frequencyPenalty", PENALISED),
    fields("training", "stop"),
    left("generation_kwargs", "its keys are read as options, but this is neither a mapping nor JSON", "{}"),
    left("logit_bias bad_words allowed_token_ids min_tokens",
        "it makes samples differ from the policy (docs/training.md): remove it", 0, "[]"),
    left("stop_token_ids", "training.stop takes texts; generation_config.json of the model lists tokens", "[]"),
    fields("dataset", "chat_template_kwargs"),
    differs("max_tool_calling_iterations", "training.maxToolCallingIterations@tool_turns",
        "with tools or environments, which only a script in Python can name"),
    differs("use_vllm", "generation.engine@use_vllm", "vLLM samples; Transformers is for debugging", default=False),
    differs("vllm_mode", "generation.topology@vllm_mode",
        "colocate is Colocate, server is Server (docs/topologies.md)"),
    differs("vllm_enable_sleep_mode", "generation.colocate.sleepLevel@sleep",
        "true is sleepLevel 2, the default; false is 0"),
    differs("vllm_model_impl", "generation.engineArgs.model_impl", "an argument of vLLM"),
    left("vllm_structured_outputs_regex vllm_guided_decoding_regex", "not supported: score the format with a reward"),
    not_needed("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", ADDRESS),
    same("vllm_gpu_memory_utilization", "generation.gpuMemoryUtilization"),
    same("vllm_max_model_length vllm_max_model_len", "generation.maxModelLen"),
    same("vllm_tensor_parallel_size", "generation.tensorParallel"),
    not_needed("cache_implementation", "only generation with transformers uses it"),
    not_needed("use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
        "vLLM batches"),
    # Saving, logging, evaluations
    differs("save_steps", "storage.checkpointEverySteps@save_steps", "below 1 it is a share of maxSteps", default=500),
    differs("save_strategy", "storage.checkpointEverySteps@save_strategy", "no: only at the end, which is always saved",
        convert=v.one_of({"steps": "steps", "no": "no", "epoch": "epoch"},
            "checkpoints are written every save_steps steps")),
    same("save_total_limit", "storage.keep"),
    left("save_only_model", "checkpoints hold all that a restart needs: storage.export writes models alone", False),
    left("save_on_each_node", "checkpoints are on one volume that all pods share", False),
    not_needed("enable_jit_checkpoint", "SIGTERM always saves"),
    left("resume_from_checkpoint", "storage.resumeFrom takes this operator's runs; else use model.path", False),
    not_needed("overwrite_output_dir ignore_data_skip restore_callback_states_from_checkpoint",
        "each job has its own folder"),
    differs("output_dir", "", "storage.claimName names the volume for checkpoints"),
    left("push_to_hub", _HUB, False),
    not_needed("hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision hub_model_revision",
        _HUB),
    differs("report_to", "training.reportTo@trackers", "tensorboard, wandb, mlflow, trackio; credentials: envFrom"),
    fields("training", "run_name"),
    differs("project wandb_project", "training.project", "project of wandb and trackio, experiment of mlflow"),
    not_needed("trackio_space_id trackio_bucket_id trackio_static_space_id wandb_entity", LOGS),
    not_needed("logging_strategy logging_steps logging_first_step logging_dir log_on_each_node logging_nan_inf_filter "
        "log_level log_level_replica disable_tqdm include_num_input_tokens_seen log_completions log_multimodal "
        "num_completions_to_print log_unique_prompts skip_memory_metrics", LOGS),
    left("log_completions_hub_repo", _HUB),
    differs("eval_strategy", "evaluation.everySteps@eval_strategy", "no: without the section evaluation"),
    differs("eval_steps", "evaluation.everySteps@eval_steps", "below 1 it is a share of maxSteps; 10 when not set"),
    differs("eval_on_start", "evaluation.atStart@eval_at_start", "a job would evaluate at the start anyway"),
    differs("num_generations_eval", "evaluation.numGenerations@eval_generations",
        "training.numGenerations when not set"),
    differs("load_best_model_at_end", "evaluation.saveBest@load_best",
        "the best checkpoint stays, beside the last one"),
    differs("metric_for_best_model", "evaluation.metricForBestModel@best_metric",
        "reward is eval/reward; there is no loss"),
    differs("greater_is_better", "evaluation.greaterIsBetter@greater_is_better", "of evaluation.metricForBestModel"),
    left("do_predict", "nothing is predicted after the training: see docs/evaluation.md", False),
    left("eval_delay", "evaluations begin at once: atStart: false leaves out the first", 0),
    not_needed("do_train do_eval per_device_eval_batch_size prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval "
        "fp16_full_eval", _EVAL_INSIDE),
)

SERVER = under("rollout.",  # of `trl vllm-serve`, and of `swift rollout`
    differs("vllm_tensor_parallel_size tensor_parallel_size", "generation.tensorParallel", "generation.tensorParallel"),
    differs("vllm_data_parallel_size data_parallel_size", "generation.server@server_copies",
        "a server group has tensorParallel x this many GPUs"),
    same("vllm_max_model_len max_model_len", "generation.maxModelLen"),
    same("vllm_gpu_memory_utilization gpu_memory_utilization", "generation.gpuMemoryUtilization"),
    not_needed("model port host torch_dtype dtype", ADDRESS),
)

TRL = Table.of("trl", "1.16.0",
    # Model
    same("model_name_or_path", "model.name"),
    same("model_revision revision", "model.revision"),
    differs("dtype torch_dtype", "model.dtype@dtype",
        "type of the weights; parallelism.optimizerDtype: master weights"),
    differs("attn_implementation", "model.attention", "varlen is PyTorch's kernel for packed sequences"),
    differs("model_init_kwargs", "", "its keys are read as options"),
    left("trust_remote_code", "code of model repositories is not run: use a model of transformers", False),
    differs("use_peft", "lora@use_lora", "true writes the section lora"),
    same("lora_r", "lora.r"),
    same("lora_alpha", "lora.alpha"),
    same("lora_dropout", "lora.dropout", default=0.05),
    differs("lora_target_modules", "lora.targetModules",
        "all-linear unless named; peft would choose by the model's type"),
    same("lora_modules_to_save", "lora.modulesToSave"),
    left("lora_target_parameters", "adapters belong to modules: name linear layers in lora.targetModules", "[]"),
    not_needed("lora_task_type", "a job trains language models"),
    left("use_rslora", "adapters are scaled by alpha / r: multiply lora.alpha by sqrt(r)", False),
    left("use_dora", "DoRA is not supported: plain LoRA is trained", False),
    left("load_in_8bit", "weights are quantized to 4 bits only: use lora.loadIn4Bit", False),
    fields("lora", "load_in_4bit"),
    left("bnb_4bit_quant_type", FOUR_BIT, "nf4"),
    not_needed("use_bnb_nested_quant bnb_4bit_quant_storage", FOUR_BIT),
    DATA,
    SHARED,
    # Older releases
    differs("max_prompt_length", "generation.maxModelLen@prompt", "not cut: maxModelLen holds prompt and completion"),
    differs("vllm_device", "generation.topology@vllm_device",
        "NodeLocal: vLLM has the last GPU of every node for itself"),
    differs("dataset_configs", "dataset.config@dataset_configs", "the first is dataset.config"),
    fields("dataset", "system_prompt"),
    fields("model", "chat_template"),
    left("dataset_prompt_column", "the column is prompt: rename it in dataset.preprocess (docs/datasets.md)", "prompt"),
    # Arguments of GRPOTrainer in a script in Python; its model and args are read as options.
    differs("train_dataset", "dataset.path", "the rows that the script lists, as a file of the ConfigMap"),
    differs("tools", "tools", "moved to a module, in the ConfigMap", convert=v.tools),
    differs("environment_factory", "environments", "moved to a module, in the ConfigMap", convert=v.environments),
    left("eval_dataset", "name other rows in evaluation.dataset (docs/evaluation.md)"),
    differs("processing_class", "", "the model's own; model.chatTemplate sets another template"),
    left("callbacks", "code inside the loop: metrics and trackers report (docs/metrics.md)",
        "RichProgressCallback", "ProgressCallback", "PrinterCallback"),
    left("rollout_func", "write it as an environment (docs/agents.md)"),
    left("optimizers optimizer_cls_and_kwargs", "the optimizer is AdamW"),
    left("reward_processing_classes", "serve reward models, and ask them in a function (docs/rewards.md)"),
    left("quantization_config", FOUR_BIT + ": set lora.loadIn4Bit"),
    SERVER,
    # Of `trl grpo` in a script.
    left("config", "its options are not known: give grpo convert that file, too"),
    differs("accelerate_config", "parallelism@deepspeed", "its stage, as its name says", convert=v.accelerate_config),
)
