"""The adapter with which an engine starts when the trainer will send it adapters. It changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from grpo_spec.contract import ENV_STATE_DIR, STATE_DIR


def empty_adapter_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which engines of this pod find the empty adapter."""
    return Path(environ.get(ENV_STATE_DIR, STATE_DIR)) / "empty-adapter"


def write_empty_adapter(folder: Path) -> None:
    """Write a folder in peft's format that vLLM loads and in which no layer of the model has an adapter.

    vLLM requires at least one layer and refuses layers that the model does not have, except inside a `base_layer`
    (`check_unexpected_modules` in vllm/lora/lora_model.py, versions 0.32 and 0.33).
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    # By hand, as the safetensors package writes arrays of numpy or torch, which are slow to load.
    names = [f"base_model.model.none.base_layer.lora_{half}.weight" for half in "AB"]
    zeros = {
        name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * place, 4 * place + 4]}
        for place, name in enumerate(names)
    }
    head = json.dumps(zeros).encode()
    head += b" " * (-len(head) % 8)
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4 * len(names)))
