"""Rotary embeddings (RoPE) whose frequencies transformers chooses again in each pass, by its longest sequence.

A token's log-probability would depend on the sequences that are packed with it. vLLM chooses once, when it starts: the
factors of `longrope` by `generation.maxModelLen`. `dynamic` it does not scale at all, so that beyond the model's own
positions there are none.
"""

from __future__ import annotations

import math
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig

LONG = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose long factors were compared with vLLM, which has a class of its own for each.

Of others, vLLM may run transformers' class, which chooses by what happens to be sampled at once.
"""
_OTHER_MODEL = ("hf_overrides", "model_impl")  # arguments with which vLLM has another configuration, or that class


def check_rope(model_config: Any, config: TrainerConfig) -> None:
    """Refuse lengths of sequences that the model has no positions for, or for which vLLM's frequencies are not known.

    Args:
        model_config: transformers' configuration of the model.
        config: the job's.

    Raises:
        ConfigError: it names the field, and the lengths that would work.
    """
    text, generation, source = model_config.get_text_config(), config.generation, config.model.source
    length = generation.max_model_len or 0
    if any("dynamic" in rope["rope_type"] for rope in _ropes(text)) and length > text.max_position_embeddings:
        raise ConfigError(
            f"generation.maxModelLen: {length} is more than the {text.max_position_embeddings} positions of {source}, "
            f"beyond which vLLM does not scale its dynamic RoPE; up to {text.max_position_embeddings} would work"
        )
    context, scales = getattr(text, "max_position_embeddings", None), {rope["rope_type"] for rope in _ropes(text)}
    if generation.engine == "Transformers" and not scales - {"default"} and length > (context or math.inf):
        raise ConfigError(  # vLLM refuses it by itself
            f"generation.maxModelLen: {length} is more than the {context} positions that {source} has; up to {context} "
            "would work"
        )
    if (short := short_length(text)) is None:
        return
    if not length and text.max_position_embeddings > short:
        raise ConfigError(
            f"generation.maxModelLen: it must be set for {source}, whose longrope has factors for sequences of up to "
            f"{short} tokens and others for longer ones: it decides which all sequences of the job have"
        )
    if length > short and text.model_type not in LONG:
        raise ConfigError(
            f"generation.maxModelLen: the longrope of {text.model_type} beyond {short} tokens was not compared with "
            f"vLLM's; up to {short} would work"
        )
    if changed := sorted(generation.python_args.keys() & _OTHER_MODEL):
        raise ConfigError(
            f"generation.engineArgs: {', '.join(changed)} cannot be set for {source}, which has longrope: vLLM may "
            "compute other factors with it; a change in the model's config.json would work"
        )


def describe(model_config: Any, max_model_len: int | None) -> str | None:
    """Say which factors all sequences of a job have, which `check_rope` accepts; None without longrope."""
    if (short := short_length(model_config)) is None:
        return None
    kind, bound = ("long", "more than") if (max_model_len or 0) > short else ("short", "at most")
    return f"longrope with the factors for {kind} sequences, since generation.maxModelLen is {bound} {short}"


def short_length(model_config: Any) -> int | None:
    """Return up to how many tokens the factors of longrope for short sequences serve; None without longrope."""
    ropes = _ropes(model_config.get_text_config())
    return min((r["original_max_position_embeddings"] for r in ropes if r["rope_type"] == "longrope"), default=None)


def keep_factors(model: Any, max_model_len: int | None) -> None:
    """Give longrope the factors that vLLM has with `max_model_len`, for sequences of any length.

    `dynamic` needs nothing: up to the length that `check_rope` allows, transformers does not scale it either.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope" or module.config.model_type not in LONG:
            continue
        config, parameters = module.config, module.config.rope_parameters
        short = parameters["original_max_position_embeddings"]
        is_long = (max_model_len or 0) > short
        find = ROPE_INIT_FUNCTIONS["longrope"]
        module.inv_freq, _ = find(config, module.inv_freq.device, seq_len=short + is_long)
        # Not transformers' scaling: vLLM knows neither `attention_factor` nor `factor`.
        usual = math.sqrt(1 + max(0.0, math.log(config.max_position_embeddings / short)) / math.log(short))
        scaling = parameters.get("long_mscale" if is_long else "short_mscale")
        module.attention_scaling = usual if scaling is None else scaling
        module.rope_type = "default"  # transformers does not change its frequencies


def _ropes(text: Any) -> list[dict[str, Any]]:
    """RoPE's parameters: of all layers, or of each type of layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [one for one in parameters.values() if isinstance(one, dict)]
    return [one for one in nested or [parameters] if one.get("rope_type")]
