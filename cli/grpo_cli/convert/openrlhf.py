"""OpenRLHF's options: those of `openrlhf.cli.train_ppo_ray`, by their dotted names."""

from __future__ import annotations

from typing import Any

from grpo_cli.convert import values as v
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.rows import Table, differs, left, not_needed, of_vllm, same, under
from grpo_cli.convert.trl import EPOCHS

ESTIMATOR = "algo.advantage.estimator"
_INSIDE = "internal to OpenRLHF"
_TIMES = "counts generations: in optimizer steps here, as maxSteps"
_COLUMNS = "the column becomes `prompt`, and that of the answer `solution`, in dataset.preprocess (docs/datasets.md)"
_ESTIMATORS = {"grpo": "group_norm", "rloo": "rloo", "reinforce_plus_plus_baseline": "reinforce_baseline"}
_CORRECTIONS = {"token_truncate": "tis", "token_mask": "icepop"}
_REWARD = "write the reward as a function (docs/rewards.md)"
_LENGTH = "prompt and completion together: maxModelLen"


def _from_0_to_1(value: Any) -> None:
    if [v.number(one) for one in v.texts(value)] != [0.0, 1.0]:
        raise v.LeftError("groups of equal rewards are replaced, whatever the rewards are")


def _two(value: Any) -> list[float]:
    low, high = (v.number(one) for one in v.texts(value))
    return [low, high]


# fmt: off
OPENRLHF = Table.of("openrlhf", "0.11.0",
    under("data.",
        differs("prompt_dataset", "dataset@dataset", "a path becomes dataset.path"),
        same("prompt_split", "dataset.split", default="train"),
        left("prompt_probs", "a job has one dataset: write all rows to a file", ""),
        differs("input_key", "dataset.preprocess@prompt_column", _COLUMNS, default="input"),
        differs("label_key", "dataset.preprocess@answer_column", _COLUMNS),
        left("input_template", "the prompt is a chat; set dataset.promptTemplate"),
        left("apply_chat_template", "prompts are chats", True),
        differs("max_len", "generation.maxModelLen@max_length", _LENGTH, convert=v.positive, default=2048),
        differs("max_samples", "training.maxSteps@most_rows", "epochs have at most so many rows", convert=v.positive),
        differs("dataloader_num_workers", "dataset.dataloaderNumWorkers", "processes that prepare prompts"),
        left("image_key", "rename the column to images in dataset.preprocess", "images"),
        not_needed("max_images_per_prompt disable_fast_tokenizer", _INSIDE),
    ),
    under("rollout.",
        differs("batch_size", "training.stepsPerGeneration@verl_batch",
            "prompts sampled at once: stepsPerGeneration x promptsPerStep", default=1024),
        same("n_samples_per_prompt", "training.numGenerations", default=1),
        same("max_new_tokens", "training.maxCompletionLength"),
        same("temperature", "training.temperature"),
        same("top_p", "training.topP"),
        not_needed("micro_batch_size max_tokens_per_gpu vllm_generate_batch_size", "vLLM batches by itself"),
    ),
    under("train.",
        differs("batch_size", "training.promptsPerStep@completions", "completions of a step / n_samples_per_prompt",
            convert=v.positive, default=128),
        same("max_epochs", "training.numIterations", default=1),
        differs("num_episodes", "training.maxSteps@epochs", EPOCHS, default=1),
        differs("max_tokens_per_gpu", "training.maxTokensPerMicroBatch", "tokens of one micro-batch"),
        not_needed("micro_batch_size dynamic_batch_enable", "training.maxTokensPerMicroBatch cuts micro-batches"),
        same("seed", "training.seed", default=42),
        differs("colocate_all", "generation.topology@vllm_mode", "true is Colocate, else Server",
            convert=v.one_of({"colocate": "true", "server": "false"}, "use true or false"), default="false"),
        left("agent_func_path", "code is not translated: name functions in tools, or a class in environments"),
        left("async_enable partial_rollout_enable", "set training.maxStaleness (docs/asynchronous.md)", False),
        not_needed("async_queue_size colocate_actor_ref colocate_critic_reward", _INSIDE),
        left("enable_ema", "no moving average of weights is kept", False),
        not_needed("ema_beta", "only enable_ema uses it"),
        left("full_determinism_enable", "prompts, seeds and completions are reproducible; kernels are not", False),
    ),
    under("actor.",
        same("model_name_or_path", "model.name"),
        differs("num_nodes", "trainer.groups@nodes", "pods: trainer.groups[].replicas"),
        differs("num_gpus_per_node", "trainer.groups@per_node", "GPUs of a pod", default=8),
        same("gradient_checkpointing_enable", "parallelism.gradientCheckpointing", convert=v.boolean, default=False),
        not_needed("gradient_checkpointing_reentrant", _INSIDE),
        same("eps_clip", "training.epsilon"),
        differs("eps_clip_low_high", "training.epsilon@clip_low_high", "epsilon and epsilonHigh", convert=_two),
        same("dual_clip", "training.delta"),
        left("policy_loss_type", "gspo is importanceSamplingLevel: sequence with lossType: grpo", "ppo"),
        same("entropy_coef", "training.entropyCoef"),
        left("aux_loss_coef", "experts are not balanced in training", 0),
        left("optim", "AdamW trains", "adam"),
        same("adam.lr", "training.learningRate", default=1e-6),
        differs("adam.betas", "training.adamBeta2@betas", "adamBeta1 and adamBeta2", convert=_two, default="0.9 0.95"),
        same("adam.eps", "training.adamEpsilon"),
        same("adam.weight_decay", "training.weightDecay", default=0.0),
        same("lr_scheduler", "training.lrSchedulerType", default="cosine_with_min_lr"),
        differs("lr_warmup_ratio", "training.warmupSteps@warmup_ratio", "a share of maxSteps", default=0.03),
        differs("min_lr_ratio", "training.lrSchedulerKwargs@min_lr_ratio", "of cosine_with_min_lr", default=0.1),
        same("max_norm", "training.maxGradNorm", default=1.0),
        same("freeze_visual_encoder", "model.freezeVisionTower", convert=v.boolean),
    ),
    not_needed("ref critic.num_nodes critic.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node",
        "the training step computes reference log-probabilities; there is no critic"),
    not_needed("critic reward.offload", "only the estimator gae uses a critic"),
    under("algo.",
        same("advantage.estimator", "training.advantageEstimator",
            convert=v.one_of(_ESTIMATORS, "use group_norm, rloo or reinforce_baseline, not {value}")),
        not_needed("advantage.gamma advantage.lambd", "only estimators with a critic use it"),
        left("advantage.no_std_norm", "set training.scaleRewards: none", False),
        differs("advantage.is_correction_enable", "training.importanceSamplingCorrection@corrects",
            "is_correction_type says which", convert=v.boolean),
        differs("advantage.is_correction_type", "training.importanceSamplingCorrection@rollout_kind",
            "tis is token_truncate, icepop token_mask",
            convert=v.one_of(_CORRECTIONS, "use tis or icepop, not {value}"), default="tis"),
        differs("advantage.is_correction_threshold", "training.importanceSamplingClipMax@bounds",
            "importanceSamplingClipMin and importanceSamplingClipMax", convert=_two, default="0.5 5.0"),
        differs("kl.init_coef", "training.beta@kl_coef", "training.beta", default=0.01),
        differs("kl.use_loss", "training.klInReward@use_kl_loss", "false is klInReward", default=False),
        differs("kl.estimator", "training.beta@kl_loss_type", "in the loss k3 with the gradient of k2, in rewards k1",
            convert=v.one_of({"k3": "k2 k3", "k1": "k1"}, "use k1, k2 or k3"), default="k1"),
        left("kl.target", "beta stays as it is"),
        not_needed("kl.horizon", "only kl.target uses it"),
        differs("dynamic_filtering_enable", "training.maxResampleTimes@dynamic_sample", "true is maxResampleTimes"),
        differs("dynamic_filtering_range", "", "groups of equal rewards are replaced", convert=_from_0_to_1),
    ),
    under("reward.",
        differs("remote_url", "rewards@reward_file", "the file becomes a module: put it on PYTHONPATH in the image"),
        left("model_name_or_path", f"serve it, and ask it with rewards[].judge; or {_REWARD}"),
        left("normalize_enable", _REWARD, False),
        left("stop_properly_penalty_coef", f"{_REWARD}: it sees whether a completion was cut"),
        differs("overlong_buffer_len", "rewards@overlong_cache", "rewards[].softOverlong.cacheLength"),
        differs("overlong_penalty_factor", "rewards@overlong_weight", "its weight"),
        left("clip_range", _REWARD),
    ),
    under("vllm.",
        differs("num_engines", "generation.server.groups@server_copies", "engines, each of tensor_parallel_size GPUs"),
        same("tensor_parallel_size", "generation.tensorParallel"),
        same("gpu_memory_utilization", "generation.gpuMemoryUtilization"),
        of_vllm("enforce_eager enable_prefix_caching", v.boolean),
        differs("enable_sleep", "generation.colocate.sleepLevel@sleep", "sleepLevel 2"),
        not_needed("sync_backend sync_with_ray", _INSIDE),
    ),
    under("ds.",
        differs("zero_stage", "parallelism.zeroStage@zero_stage", "parallelism.zeroStage", default=2),
        differs("param_dtype", "model.dtype@dtype", "type of the weights in training and generation",
            convert=v.one_of({"bfloat16": "bf16", "float16": "fp16"}, "use bf16 or fp16"), default="bf16"),
        differs("adam_offload", "parallelism.offloadOptimizer@offload", "parallelism.offloadOptimizer: cpu"),
        differs("attn_implementation", "model.attention", "varlen is PyTorch's kernel for packed sequences"),
        differs("use_liger_kernel", "model.useLigerKernel", "Liger's kernels are on if they support the model"),
        same("ring_attn_size", "parallelism.sequence"),
        not_needed("ring_attn_head_stride", "only ring_attn_size uses it"),
        differs("lora.rank", "lora.r@lora_rank", "0: no section lora"),
        same("lora.alpha", "lora.alpha", default=16),
        same("lora.dropout", "lora.dropout", default=0.0),
        differs("lora.target_modules", "lora.targetModules", "all-linear unless named"),
        differs("load_in_4bit", "lora.loadIn4Bit", "NF4 of bitsandbytes", convert=v.boolean),
        left("tensor_parallel_size", "use zeroStage 3", 1),
        left("packing_samples", "always so: sequences are packed", True, False),
        not_needed("enable_sleep overlap_comm zpg grad_accum_dtype deepcompile use_universal_ckpt value_head_prefix "
            "experts_implementation", _INSIDE),
    ),
    under("ckpt.",
        differs("save_steps", "storage.checkpointEverySteps@save_steps", f"{_TIMES}; -1 saves only at the end"),
        same("max_num", "storage.keep"),
        left("load_enable", "a new job begins at step 0, a restarted one continues", True, False),
        not_needed("output_dir path", "storage.claimName names the volume for checkpoints"),
        not_needed("save_hf max_mem disable_ds best_metric_key", "each checkpoint has a folder for from_pretrained"),
    ),
    under("eval.",
        differs("dataset", "evaluation.dataset@eval_dataset", "evaluation.dataset, if eval.steps is over 0"),
        differs("split", "evaluation.dataset.split@eval_rows", "of the dataset of evaluations"),
        differs("steps", "evaluation.everySteps@eval_steps", f"{_TIMES}; -1: without evaluation", default=-1),
        differs("temperature", "evaluation.temperature@eval_temperature", "of evaluations", default=0.6),
        differs("n_samples_per_prompt", "evaluation.numGenerations@eval_generations", "of a problem", default=4),
    ),
    under("logger.",
        differs("tensorboard_dir", "training.reportTo@tensorboard", "tensorboard, in the run's folder"),
        left("wandb.key", "a secret: reportTo: [wandb], and a Secret in podTemplate.envFrom (docs/metrics.md)"),
        same("wandb.project", "training.project"),
        same("wandb.run_name", "training.runName"),
        not_needed("logging_steps wandb.org wandb.group", "every step is in metrics.jsonl (docs/metrics.md)"),
    ),
    not_needed("local_rank", "the operator assigns ranks"),
    left("use_ms", "models and datasets are the Hugging Face hub's", False),
)
# fmt: on


def settle_openrlhf(draft: Draft) -> None:
    """Turn what OpenRLHF counts in completions, and its bounds, into the facts and fields that are settled later."""
    facts = draft.facts
    if "completions" not in facts:
        return
    generations = draft.fields.get("training.numGenerations", 1)
    facts["verl_mini_batch"] = max(1, facts["completions"] // generations)
    length = facts["max_length"]
    if "training.maxCompletionLength" in draft.fields:
        draft.set("generation.maxModelLen", length)
    else:
        draft.set("training.maxCompletionLength", length, "a completion may take all of max_len")
        draft.set("generation.maxModelLen", 2 * length, "and its prompt as much")
    if not facts.get("use_kl_loss"):
        facts |= {"kl_in_reward": True, "kl_in_reward_coef": facts["kl_coef"]}
    if bounds := facts.get("clip_low_high"):
        draft.set("training.epsilon", bounds[0])
        draft.set("training.epsilonHigh", bounds[1])
    draft.set("training.adamBeta1", facts["betas"][0])
    draft.set("training.adamBeta2", facts["betas"][1])
    if facts.get("corrects"):
        low, high = facts["bounds"]
        facts |= {"rollout_is": facts["rollout_kind"], "rollout_is_threshold": high}
        draft.set("training.importanceSamplingClipMin", low)
    if rows := facts.get("most_rows"):
        draft.set("dataset.split", f"{draft.fields.get('dataset.split', 'train')}[:{rows}]", "max_samples")
    if "tensorboard" in facts:
        facts["trackers"] = ["tensorboard"]
    if "overlong_cache" in facts:
        facts["overlong_buffer"] = True
    facts["eval_samples"] = True
    if "eval_rows" in facts and "eval_dataset" in facts and facts["eval_steps"] > 0:
        draft.set("evaluation.dataset.split", facts["eval_rows"])
    if facts["prompt_column"] != "prompt" or "answer_column" in facts:
        draft.left("columns", facts["prompt_column"], _COLUMNS, "dataset.preprocess")
