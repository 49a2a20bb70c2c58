"""A model's engines by its config.json, before vLLM starts: the number of GPUs, the part. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_spec.contract import Engine
from grpo_spec.errors import ConfigError
from grpo_spec.inputs import VISION_FAMILIES, ModelConfig

_VOCABULARY_BLOCK = 64  # vLLM pads a vocabulary to a multiple of it (`VocabParallelEmbedding`)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_split(field: str, tensor_parallel: int, model: Mapping[str, Any]) -> None:
    """Refuse a number of GPUs over which vLLM cannot split the model's layers.

    Args:
        field: where `tensor_parallel` was set, for the message.
        tensor_parallel: number of GPUs for one copy of the model.
        model: the model's config.json; what it does not give is accepted.

    Raises:
        ConfigError: names `field`, what cannot be split, and the largest smaller number that would work. That number
            divides `tensor_parallel`, so it also divides every number of GPUs that `tensor_parallel` divides.
    """
    if not (found := _indivisible(tensor_parallel, model)):
        return
    divisors = (size for size in range(1, tensor_parallel) if tensor_parallel % size == 0)
    better = max(size for size in divisors if not _indivisible(size, model))
    raise ConfigError(
        f"{field}: the model's {' and '.join(found)} cannot be split evenly over {tensor_parallel} GPUs; "
        f"{better} would work"
    )


def check_stages(engine: Engine, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model has fewer layers than the engine has pipeline stages."""
    layers = (model.get("text_config") or model).get("num_hidden_layers")
    if isinstance(layers, int) and layers < engine.pipeline_parallel:
        raise ConfigError(
            f"podsPerEngine of group {engine.group}: the model's {layers} layers cannot be divided into "
            f"{engine.pipeline_parallel} pipeline stages; fewer pods or a larger tensorParallel would work"
        )


def split_sizes(model: Mapping[str, Any], most: int) -> list[int]:
    """Return the numbers of GPUs, at most `most`, over which vLLM can split the model."""
    return [size for size in range(1, most + 1) if not _indivisible(size, model)]


def _indivisible(size: int, model: Mapping[str, Any]) -> list[str]:
    """Name what vLLM cannot split over `size` GPUs. Experts are left out: engine arguments say how they are split."""
    text = model.get("text_config") or model
    found = []
    if isinstance(heads := text.get("num_attention_heads"), int):
        groups = text.get("num_key_value_heads")
        key_values = groups if isinstance(groups, int) else heads
        # vLLM replicates key and value heads if there are fewer of them than GPUs.
        if heads % size or (key_values % size and size % key_values):
            shared = "" if key_values == heads else f" and {key_values} key and value heads"
            found.append(f"{heads} attention heads{shared}")
    neurons = text.get("intermediate_size")
    if isinstance(neurons, int) and not any(text.get(name) for name in _EXPERTS) and neurons % size:
        found.append(f"intermediate_size of {neurons}")
    words = text.get("vocab_size")
    if isinstance(words, int) and -words // _VOCABULARY_BLOCK * _VOCABULARY_BLOCK % size:
        found.append(f"vocabulary of {words} tokens")
    return found


def takes_text_alone(model: ModelConfig) -> bool:
    """Whether engines leave out a vision tower: no prompts have images, and a push has no weights for the tower."""
    config = read_model_config(model)
    return "vision_config" in config and config.get("model_type") not in VISION_FAMILIES


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """Return the model's config.json if it is on this machine, in a folder or the hub's cache; else an empty dict."""
    if model.path is not None:
        file = Path(model.path) / "config.json"
    else:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.source, "config.json", revision=model.revision)
        if not isinstance(found, str):
            return {}
        file = Path(found)
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text())
    return config
