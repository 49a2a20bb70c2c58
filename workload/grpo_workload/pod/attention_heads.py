"""Checks, before vLLM starts, that a model's attention heads can be split over the GPUs. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.inputs import ModelConfig


def check_heads(field: str, tensor_parallel: int, model: Mapping[str, Any]) -> None:
    """Refuse a number of GPUs over which vLLM cannot split the model's attention layers.

    Args:
        field: where `tensor_parallel` was set, for the message.
        tensor_parallel: number of GPUs for one copy of the model.
        model: the model's config.json; accepted if it does not give the number of heads.

    Raises:
        ConfigError: names `field`, the heads, and the largest smaller number that would work. That number divides
            `tensor_parallel`, so it also divides every number of GPUs that `tensor_parallel` divides.
    """
    text = model.get("text_config") or model
    heads = text.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    groups = text.get("num_key_value_heads")
    key_values = groups if isinstance(groups, int) else heads

    def works(size: int) -> bool:
        # vLLM replicates key and value heads if there are fewer of them than GPUs.
        return heads % size == 0 and (key_values % size == 0 or size % key_values == 0)

    if works(tensor_parallel):
        return
    better = max(size for size in range(1, tensor_parallel) if tensor_parallel % size == 0 and works(size))
    shared = "" if key_values == heads else f" and {key_values} key and value heads"
    raise ConfigError(
        f"{field}: the model's {heads} attention heads{shared} cannot be split evenly over {tensor_parallel} GPUs; "
        f"{better} would work"
    )


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
