"""Whether a model's attention heads can be spread over tensor parallel GPUs: said before vLLM is started. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_workload.inputs import ModelConfig


def check_heads(field: str, tensor_parallel: int, model: Mapping[str, Any]) -> None:
    """Refuse what vLLM's attention layers cannot be cut into.

    Args:
        field: where `tensor_parallel` was set, for the message.
        tensor_parallel: GPUs of one copy of the model.
        model: the model's config.json; one that does not say how many heads there are is not judged.

    Raises:
        ValueError: names `field`, the heads, and the largest smaller number that would work; it divides `tensor_parallel`, and with it
            whatever number of GPUs that divided.
    """
    text = model.get("text_config") or model
    heads = text.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    groups = text.get("num_key_value_heads")
    key_values = groups if isinstance(groups, int) else heads

    def works(size: int) -> bool:
        # vLLM copies key and value heads where there are fewer of them than GPUs.
        return heads % size == 0 and (key_values % size == 0 or size % key_values == 0)

    if works(tensor_parallel):
        return
    better = max(size for size in range(1, tensor_parallel) if tensor_parallel % size == 0 and works(size))
    shared = "" if key_values == heads else f" and {key_values} key and value heads"
    raise ValueError(
        f"{field}: the model's {heads} attention heads{shared} cannot be split evenly over {tensor_parallel} GPUs; {better} would work"
    )


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """The model's config.json if it is on this machine already, in its folder or in the hub's cache; empty if not."""
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
