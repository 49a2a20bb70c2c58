"""The card of a model that a run has made: what the Hugging Face hub shows of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from huggingface_hub import EvalResult, ModelCardData

from grpo_spec.lora import LoraConfig
from grpo_spec.trainer import TrainerConfig
from grpo_spec.words import counted

_SHOWN = ("reward", "reward_std", "frac_reward_zero_std", "kl", "completions/mean_length", "completions/clipped_ratio")
_ENTROPY = "trained/entropy"


def model_card(
    config: TrainerConfig,
    name: str,
    step: int,
    metrics: Mapping[str, float],
    evaluation: Mapping[str, float],
    *,
    has_adapters: bool = False,
) -> str:
    """Return README.md of the model after `step` steps.

    Args:
        config: the job.
        name: the job's name.
        step: number of optimizer steps.
        metrics: those of the last step.
        evaluation: those of the evaluation of these weights; empty if there was none.
        has_adapters: the folder holds adapters, not a whole model.
    """
    model, dataset, training = config.model, config.dataset, config.training
    rows = {key: metrics[key] for key in (*_SHOWN, _ENTROPY) if key in metrics}
    rows |= {key: value for key, value in evaluation.items() if key.startswith(("eval/reward", "eval/completions"))}
    known = {key: value for key, value in rows.items() if math.isfinite(value)}
    settings = {
        "loss": training.loss or training.loss_type,
        "prompts of a step, completions of a prompt": f"{training.prompts_per_step}, {training.num_generations}",
        "learning rate": f"{training.learning_rate:g} ({training.lr_scheduler_type})",
        "beta": f"{training.beta:g}",
        "temperature": f"{training.temperature:g}",
        "longest completion": f"{training.max_completion_length} tokens",
        "rewards": ", ".join(f"{reward.name} x {reward.weight:g}" for reward in config.rewards),
        "adapters": "none" if config.lora is None else _adapters(config.lora),
        "seed": str(training.seed),
    }
    data = ModelCardData(
        base_model=model.name,
        datasets=dataset.name,
        library_name="peft" if has_adapters else "transformers",
        tags=["grpo", "grpo-operator", "reinforcement-learning"],
        model_name=name,
        eval_results=_results(config, known),
    )
    of = model.name or model.source
    return "\n".join(
        [
            f"---\n{data.to_yaml().rstrip()}\n---\n",
            f"# {name}, after {counted(step, 'step')}\n",
            f"[{of}](https://huggingface.co/{of})" if model.name else f"`{of}`",
            "was trained with GRPO ([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) by grpo-operator.\n",
            _table("metric", {key: f"{value:.6g}" for key, value in known.items()}),
            _table("setting", settings),
        ]
    )


def _adapters(lora: LoraConfig) -> str:
    rounded = ", of a base model in 4 bits (NF4 with double quantization)" if lora.load_in_4bit else ""
    return f"LoRA, r {lora.r}, alpha {lora.alpha:g}{rounded}"


def _results(config: TrainerConfig, metrics: Mapping[str, float]) -> list[EvalResult] | None:
    if config.evaluation is None:
        return None
    rows = config.evaluation.dataset
    gym = rows.reasoning_gym
    name = rows.name or rows.path or f"reasoning-gym {gym.dataset if gym else ''}"
    return [
        EvalResult("text-generation", name, name, key, value, dataset_split=rows.split)
        for key, value in metrics.items()
        if key.startswith("eval/reward")
    ] or None


def _table(title: str, rows: Mapping[str, str]) -> str:
    return "\n".join(
        [f"| {title} | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""]
    )
