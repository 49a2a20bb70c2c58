"""ms-swift's options (`swift rlhf --rlhf_type grpo`, `swift rollout`): TRL's, and those that differ from TRL's."""

from __future__ import annotations

from dataclasses import replace

from grpo_cli.convert import trl
from grpo_cli.convert import values as v
from grpo_cli.convert.rows import UNSET, Table, differs, fields, left, not_needed, of_vllm, rows, same, under

_TURNS = "code is not translated: name functions in tools, or a class in environments"
_REWARD = "write the reward as a function (docs/rewards.md)"
_LENGTHS = "not cut: maxModelLen holds prompt and completion"
_INSIDE = "internal to ms-swift"
_TEMPLATE = "the tokenizer's chat template is used"
_IN_TURNS = "with Colocate the engine sleeps while the trainer works (colocate.sleepLevel); the trainer's weights stay"

# fmt: off
OWN = rows(
    left("rlhf_type", "a job trains with GRPO", "grpo"),
    differs("model", "model.name", "must be on the Hugging Face hub; ms-swift means ModelScope unless --use_hf"),
    same("model_revision", "model.revision"),
    differs("torch_dtype", "model.dtype@dtype", "type of the weights; parallelism.optimizerDtype: master weights"),
    differs("attn_impl", "model.attention", "varlen is PyTorch's kernel for packed sequences"),
    differs("tuner_type train_type sft_type", "lora@use_lora", "lora writes the section lora, full does not",
        convert=v.one_of({True: "lora", False: "full"}, "{value} is not supported: full is taken; use lora or full"),
        default="lora"),
    same("lora_rank", "lora.r", default=8),
    same("lora_alpha", "lora.alpha", default=32),
    same("lora_dropout", "lora.dropout", default=0.05),
    differs("target_modules", "lora.targetModules", "all-linear unless named"),
    fields("lora", "modules_to_save"),
    left("use_rslora use_dora", "adapters are plain LoRA, scaled by alpha / r", False),
    differs("adapters", "lora.path", "a folder in the container; its r, alpha and modules count", convert=v.one_name),
    left("ref_adapters", "the reference is the model without adapters: merge them into the model of model.path", "[]"),
    left("ref_model", "the reference model is the initial model"),
    left("quant_method", "bitsandbytes quantizes weights: use bnb with 4 bits", "bnb"),
    differs("quant_bits", "lora.loadIn4Bit", "4 is true: NF4 of bitsandbytes",
        convert=v.one_of({True: "4"}, "weights are quantized to 4 bits only")),
    left("bnb_4bit_quant_type", trl.FOUR_BIT, "nf4"),
    not_needed("bnb_4bit_use_double_quant bnb_4bit_quant_storage", trl.FOUR_BIT),
    not_needed("bnb_4bit_compute_dtype", "layers compute in model.dtype"),
    differs("dataset", "dataset@swift_dataset",
        "name#N is split train[:N]; dataset.preprocess makes the column prompt"),
    differs("val_dataset", "evaluation.dataset@eval_dataset", "evaluation.dataset; name#N is split train[:N]"),
    left("split_dataset_ratio", "no rows are kept for evaluation: split the dataset, and name both parts", 0),
    not_needed("val_dataset_shuffle", "evaluation.maxPrompts draws rows at random, the same each time"),
    left("cached_val_dataset", "rows are tokenized during training: name the dataset itself", "[]"),
    left("cached_dataset", "rows are tokenized during training: name the dataset itself", "[]"),
    fields("dataset", "max_pixels"),
    same("dataset_shuffle", "dataset.shuffle"),
    not_needed("train_dataloader_shuffle", "rows are shuffled once: dataset.shuffle"),
    not_needed("dataset_num_proc load_from_cache_file download_mode strict columns remove_unused_columns lazy_tokenize",
        _INSIDE),
    not_needed("use_hf", "names are the Hugging Face hub's"),
    left("external_plugins custom_register_path custom_dataset_info", _REWARD, "[]"),
    differs("system", "dataset.systemPrompt@system", "dataset.systemPrompt; a .txt file is not read: paste its text"),
    left("template template_type", _TEMPLATE),
    same("enable_thinking", "dataset.chatTemplateKwargs.enable_thinking", convert=v.boolean),
    left("loss_scale", "all tokens of a completion have the same weight", "default", "last_round"),
    left("truncation_strategy", _LENGTHS),
    differs("max_length", "generation.maxModelLen@prompt", _LENGTHS),
    differs("reward_funcs", "rewards@rewards", "accuracy, format, soft_overlong are built in; others: functions"),
    left("reward_model reward_model_plugin reward_adapters",
        "serve it, and ask it with rewards[].judge or a function (docs/rewards.md)", "[]"),
    left("cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct "
        "cosine_max_len_value_correct cosine_max_len repetition_n_grams repetition_max_penalty", _REWARD),
    differs("soft_max_length", "rewards@overlong_length", "rewards[].softOverlong.maxLength"),
    differs("soft_cache_length", "rewards@overlong_cache", "rewards[].softOverlong.cacheLength"),
    differs("deepspeed", "parallelism@deepspeed", "zero2 is zeroStage: 2, zero3_offload also offloadOptimizer: cpu"),
    same("lr_scheduler_type", "training.lrSchedulerType", default="cosine"),
    same("weight_decay", "training.weightDecay", default=0.1),
    same("adam_beta2", "training.adamBeta2", default=0.95),
    differs("per_device_train_batch_size", "training.promptsPerStep@per_device", trl.BATCH_SIZE, default=1),
    same("beta", "training.beta", default=0.04),
    same("loss_type", "training.lossType", default="grpo"),
    same("temperature", "training.temperature", default=0.9),
    same("stop_words", "training.stop"),
    same("overlong_filter", "training.maskTruncatedCompletions"),
    differs("dynamic_sample", "training.maxResampleTimes@dynamic_sample", "true is training.maxResampleTimes"),
    differs("max_resample_times", "training.maxResampleTimes@resample_times",
        "3 unless set; only dynamic_sample uses it"),
    fields("training", "advantage_estimator"),
    differs("kl_in_reward", "training.klInReward@kl_in_reward",
        "training.klInReward; true unless set with the estimators rloo and reinforce_plus_plus"),
    same("rollout_importance_sampling_mode", "training.importanceSamplingCorrection", default="none"),
    same("rollout_importance_sampling_threshold", "training.importanceSamplingClipMax"),
    not_needed("log_entropy log_rollout_offpolicy_metrics wandb_log_unique_prompts", trl.LOGS),
    same("tau_pos", "training.sapoTemperaturePos"),
    same("tau_neg", "training.sapoTemperatureNeg"),
    left("multi_turn_scheduler max_turns use_gym_env gym_env agent_template", _TURNS, False),
    not_needed("vllm_server_pass_dataset", "rewards get the columns; turns on the server are not taken over"),
    not_needed("completion_length_limit_scope", "training.maxCompletionLength counts all turns together"),
    differs("async_generate", "training.maxStaleness", "true is 1", convert=lambda value: int(v.boolean(value)),
        default=False),
    same("sleep_level", "generation.colocate.sleepLevel", default=0),
    differs("offload_model", "", _IN_TURNS),
    differs("offload_optimizer", "parallelism.offloadOptimizer@offload_generating",
        "parallelism.offloadOptimizer: generating"),
    not_needed("move_model_batches enable_flattened_weight_sync", "weights are pushed in buckets"),
    not_needed("vllm_server_group_port", trl.ADDRESS),
    left("num_infer_workers", "use generation.nodeLocal.enginesPerNode"),
    differs("use_lmdeploy infer_backend", "", "vLLM samples"),
    of_vllm("vllm_enforce_eager", v.boolean, "vllm_"),
    of_vllm("vllm_max_num_seqs", v.integer, "vllm_"),
    of_vllm("vllm_enable_prefix_caching", v.boolean, "vllm_"),
    not_needed("vllm_enable_lora vllm_max_lora_rank",
        "lora.push: adapters sends engines only the adapters (docs/lora.md)"),
    of_vllm("vllm_limit_mm_per_prompt", v.mapping, "vllm_"),
    left("vllm_pipeline_parallel_size", "set podsPerEngine of a group of generation.server", 1),
    differs("freeze_vit", "model.freezeVisionTower", "with the aligner"),
    left("freeze_aligner freeze_llm", "model.freezeVisionTower alone freezes a part of a model", True, False),
    same("sequence_parallel_size", "parallelism.sequence"),
    left("padding_free packing use_logits_to_keep", "always packed, with logits of completions only", True, False),
    not_needed("add_version model_type seq_kd teacher_model acc_strategy save_safetensors logging_nan_inf_filter "
        "ignore_args_error check_model", _INSIDE),
)


_OWN_NAMES = {row.name for row in OWN}
_OWN_DEFAULTS = {(row.field, row.fact) for row in OWN if row.default is not UNSET}
_INHERITED = [
    replace(row, default=UNSET) if (row.field, row.fact) in _OWN_DEFAULTS else row
    for row in rows(trl.SHARED, trl.DATA)
    if row.name not in _OWN_NAMES and not row.name.startswith("dataset_")
]

SWIFT = Table.of("ms-swift", "4.5.2",
    OWN,
    # Of `swift rollout`
    trl.SERVER,
    under("rollout.",
        not_needed("infer_backend use_hf", trl.ADDRESS),
        left("multi_turn_scheduler max_turns external_plugins use_gym_env", _TURNS, False),
        not_needed("vllm_use_async_engine use_async_engine vllm_enable_lora vllm_max_lora_rank", _INSIDE),
    ),
    # Environment
    differs("NPROC_PER_NODE nproc_per_node", "trainer.groups@per_node", "GPUs of a pod: trainer.groups[].gpus"),
    differs("NNODES nnodes", "trainer.groups@nodes", "pods: trainer.groups[].replicas"),
    not_needed("CUDA_VISIBLE_DEVICES NODE_RANK node_rank master_addr master_port MASTER_ADDR MASTER_PORT RANK "
        "WORLD_SIZE", "the operator assigns ranks and devices"),
    not_needed("PYTHONPATH", "the image sets it; for your own functions see docs/rewards.md"),
    differs("MAX_PIXELS", "dataset.maxPixels",
        "images are made smaller in their proportions; the model's processor rounds sides to its patches"),
    left("VIDEO_MAX_PIXELS FPS_MAX_FRAMES", "no videos: make images of their frames"),
    _INHERITED,
)
