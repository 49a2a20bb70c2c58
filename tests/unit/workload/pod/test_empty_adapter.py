"""The adapter with which engines start is one that safetensors reads, without a layer of the model in it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from grpo_workload.pod.empty_adapter import write_empty_adapter


def test_the_adapter_is_read_as_two_zeros_of_no_layer(tmp_path: Path) -> None:
    write_empty_adapter(tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(found) == [f"base_model.model.none.base_layer.lora_{half}.weight" for half in "AB"]
    for zero in found.values():
        assert (zero.shape, zero.dtype, zero.item()) == ((1, 1), np.float32, 0.0)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
