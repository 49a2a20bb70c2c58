"""Whether a model may be fed the prompt of several completions once: `algorithm/shared_prompts.py` has the layout."""

from __future__ import annotations

from typing import Any

from grpo_spec.trainer import TrainerConfig
from grpo_workload.policy.model.attention import VARLEN
from grpo_workload.policy.model.families import TESTED
from grpo_workload.policy.model.vision import has_vision


def why_apart(config: TrainerConfig, model_config: Any) -> str | None:
    """Return why each completion has its prompt to itself; None if completions may share one.

    Models with a state from token to token need no look: their micro-batches hold one sequence (`check_layers`).
    """
    if config.model.attention != VARLEN:
        return f"model.attention {config.model.attention} cannot share its keys"
    if config.training.router_replay:
        return "engines may have sent the tokens of one prompt to other experts for each (training.routerReplay)"
    if has_vision(model_config):
        return f"{model_config.model_type} is trained with images"
    text = model_config.get_text_config()
    if getattr(text, "kv_lora_rank", None) is not None:
        return f"{text.model_type} has latent attention, whose copied keys would take more memory than they save"
    if config.parallelism.offload_activations and _width_of_keys(text) > text.hidden_size / 2:
        return f"{text.model_type} has wide keys, whose copies take much beside parallelism.offloadActivations"
    if model_config.model_type not in TESTED:
        return f"{model_config.model_type} is none of the families that were tried"
    return None


def _width_of_keys(text: Any) -> int:
    """Width of the keys of one token, in the layer whose keys are widest; 0 without attention."""
    if getattr(text, "num_attention_heads", None) is None:
        return 0
    return max(map(_width_in_layer, text.per_layer_config))


def _width_in_layer(layer: Any) -> int:
    heads: int = layer.num_attention_heads
    size: int = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return size * (getattr(layer, "num_key_value_heads", None) or heads)
