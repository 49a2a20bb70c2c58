"""Settings of each trainer: the same model, prompts, loss and engine, and otherwise its best published settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS
from benchmarks.common.metered import prompts
from benchmarks.common.runs import job_command
from benchmarks.vs_trl.trainer_rows import Row, engine_arguments, our_spec

SAMPLES = NUM_PROMPTS * NUM_GENERATIONS
STEPS = 100  # more than are ever measured
SWIFT_MICRO_BATCH = 16  # without Liger, 32 need more than 80 GB
SHARE = 0.3
"""Share of the GPU's memory that the engine gets, as in `vs_trl/trainer_rows.py`."""

SWIFT_REWARD = """
from swift.rewards import ORM, orms


class Varied(ORM):
    def __call__(self, completions, **_):
        return [sum(map(ord, one)) % 97 / 97 for one in completions]


orms["varied"] = Varied
"""
"""A reward that varies within each group, for ms-swift's --external_plugins."""

Command = list[str]


def ours(model: Path, folder: Path, device: str, longest: int) -> Command:
    """Defaults: micro-batches as large as memory allows, Liger's layers, sequences without padding."""
    row = Row.parse("ours-lognormal-default", ())
    return job_command(folder, our_spec(row, model, folder, device, longest))


def trl(model: Path, folder: Path, device: str, longest: int) -> Command:
    """Liger's layers and micro-batches of 32, the fastest of those tried (`vs_trl/trainer.py`)."""
    name = "trl-lognormal-large-norng" + ("-liger" if device == "cuda" else "")
    row = f"Row.parse({name!r}, ()).prepare(Path({str(model)!r}), {device!r}, longest={longest})"
    return ["-c", f"from pathlib import Path\nfrom benchmarks.vs_trl.trainer_rows import Row\n{row}[0]()"]


def swift(model: Path, folder: Path, device: str, longest: int) -> Command:
    """Sequences without padding by flash-attn, which it does not combine with Liger's layers, micro-batches of 16.

    Settings are those of its examples for colocated GRPO (examples/train/grpo/internal of modelscope/ms-swift).
    """
    rows = ({"messages": [{"role": "user", "content": one}]} for one in prompts())
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(SWIFT_REWARD)
    engine = engine_arguments(device)
    options: dict[str, Any] = {
        "rlhf_type": "grpo",
        "model": model,
        "model_type": "qwen2",
        "template": "qwen2_5",
        "use_chat_template": False,
        "dataset": folder / "data.jsonl",
        "load_from_cache_file": False,
        "split_dataset_ratio": 0,
        "external_plugins": folder / "reward.py",
        "reward_funcs": "varied",
        "tuner_type": "full",
        "torch_dtype": "bfloat16",
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "attn_impl": "flash_attention_2" if device == "cuda" else "sdpa",
        "padding_free": device == "cuda",
        "gradient_checkpointing": True,
        "per_device_train_batch_size": SWIFT_MICRO_BATCH,
        "gradient_accumulation_steps": SAMPLES // SWIFT_MICRO_BATCH,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": longest,
        "max_length": PROMPT_TOKENS,
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "loss_type": "dapo",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": SHARE,
        "vllm_max_model_len": PROMPT_TOKENS + longest,
        "vllm_max_num_seqs": engine.pop("max_num_seqs", SAMPLES),
        "vllm_enforce_eager": engine.pop("enforce_eager", False),
        "vllm_engine_kwargs": json.dumps(engine),
        "sleep_level": 1 if device == "cuda" else 0,
        "temperature": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 0,
        "output_dir": folder / "swift",
    }
    given = [
        part
        for name, value in options.items()
        for part in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    return ["-m", "swift.cli.rlhf", *given]


def verl(model: Path, folder: Path, device: str, longest: int) -> Command:
    """FSDP2, sequences without padding, micro-batches of 16,384 tokens, Liger's layers, no pass for old log-probs.

    Its performance guide (docs/perf/perf_tuning.rst) names the first four, docs/algo/rollout_corr.md the last.
    Weights and AdamW's moments are bfloat16 as the other sides'; its default is float32.
    """
    import pandas

    own = identity(model, folder)
    rows = [{"prompt": [{"role": "user", "content": one}]} for one in prompts()]
    more = {"data_source": "bench", "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": 0}}
    pandas.DataFrame([row | more for row in rows]).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return sum(map(ord, solution_str)) % 97 / 97\n"
    )
    # verl patches a class of TRL if there is a TRL, and the newest does not have it.
    (trl := folder / "packages/trl/experimental").mkdir(parents=True)
    for package in (trl.parent, trl):
        (package / "__init__.py").touch()
    (trl / "ppo.py").write_text("class AutoModelForCausalLMWithValueHead:\n    pass\n")
    engine = engine_arguments(device)
    graphs = engine.pop("compilation_config", {})
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    is_gpu = device == "cuda"
    options: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": folder / "data.parquet",
        "data.val_files": folder / "data.parquet",
        "data.train_batch_size": NUM_PROMPTS,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": longest,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": own,
        "actor_rollout_ref.model.use_remove_padding": is_gpu,
        "actor_rollout_ref.model.use_liger": is_gpu,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.ppo_mini_batch_size": NUM_PROMPTS,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 16384,
        f"{actor}.use_kl_loss": False,
        f"{actor}.fsdp_config.model_dtype": "bfloat16",
        f"{actor}.use_torch_compile": is_gpu,
        f"{actor}.fsdp_config.use_torch_compile": is_gpu,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": NUM_GENERATIONS,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": SHARE,
        f"{rollout}.max_model_len": PROMPT_TOKENS + longest,
        f"{rollout}.max_num_seqs": engine.pop("max_num_seqs", SAMPLES),
        f"{rollout}.max_num_batched_tokens": engine.pop("max_num_batched_tokens"),
        f"{rollout}.enforce_eager": engine.pop("enforce_eager", False),
        # vLLM 0.33 refuses a part of a push that has a tied head without its embedding.
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 4096,
        f"+{rollout}.enable_sleep_mode": is_gpu,
        f"{rollout}.free_cache_engine": is_gpu,
        f"{rollout}.agent.num_workers": NUM_PROMPTS if is_gpu else 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.n_gpus_per_node": 1,
        "trainer.device": device,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.total_training_steps": STEPS,
        "trainer.default_local_dir": folder / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": 64,  # of its own accounting: its processes mostly wait
    }
    if not is_gpu:
        options["+ray_kwargs.ray_init.num_gpus"] = 1  # which it asks for on a CPU too
        options["+actor_rollout_ref.model.override_config.attn_implementation"] = "sdpa"
    options |= {f"+{rollout}.engine_kwargs.vllm.{name}": value for name, value in engine.items()}
    options |= {f"+{rollout}.engine_kwargs.vllm.compilation_config.{name}": value for name, value in graphs.items()}
    return ["-m", "verl.trainer.main_ppo", *(f"{name}={value}".replace(" ", "") for name, value in options.items())]


def identity(model: Path, folder: Path) -> Path:
    """Return a folder with the same model, whose chat template adds nothing to a message."""
    (own := folder / "model").mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (own / file.name).symlink_to(file)
    (own / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return own


SIDES: dict[str, Callable[[Path, Path, str, int], Command]] = {
    "ours": ours,
    "trl": trl,
    "ms-swift": swift,
    "verl": verl,
}
"""By name, a function that writes what a side reads into a folder, and returns the arguments of python for it."""
