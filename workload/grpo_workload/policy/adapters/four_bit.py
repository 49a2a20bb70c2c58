"""The model's own weights in 4 bits (QLoRA, arXiv:2305.14314): NF4 with double quantization, by bitsandbytes.

Only adapters are trained, so the weights are rounded once, when they are loaded: to the same values in each attempt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from grpo_spec.errors import ConfigError
from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters.lora import without_adapters
from grpo_workload.policy.model import vision
from grpo_workload.policy.model.one_reader import shared
from grpo_workload.ranks.environment import show

show("bitsandbytes")
from bitsandbytes.nn.modules import Linear4bit, Params4bit  # noqa: E402

_FORMAT: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}


class _Layer(Linear4bit):
    """A linear layer that multiplies by the values of its 4-bit weights, in their former type."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        dtype = layer.weight.dtype
        make: Any = super().__init__  # bitsandbytes is partly typed
        make(layer.in_features, layer.out_features, bias=False, compute_dtype=dtype, device="meta")
        weight: Any = Params4bit(shared(layer.weight.data, device), requires_grad=False, module=self, **_FORMAT)
        self.weight = weight.to(device)
        self.bias = layer.bias
        # Otherwise evaluation on a CPU packs the weights in another way, after which they have no backward pass.
        self.support_avx512bf16_for_cpu = False

    def _save_to_state_dict(self, *args: Any) -> None:
        nn.Linear._save_to_state_dict(self, *args)  # without the blocks' constants: checkpoints have no frozen weights


def layers(model: Any, config: LoraConfig) -> dict[str, nn.Linear]:
    """Return the layers that go into 4 bits, by name; of the model as transformers makes it, without adapters.

    All linear layers but the output layer, those of a vision tower, those that are trained whole, and those that
    cannot have adapters. So also not experts that are stacked in one parameter.

    ConfigError if there are none.
    """
    kept = [model.get_output_embeddings(), *(vision.tower(model).values() if vision.has_vision(model.config) else ())]
    kept += [module for path, module in model.named_modules() if path.endswith(config.modules_to_save)]
    ids = {id(module) for part in kept for module in part.modules()}
    used_otherwise = without_adapters(model)
    found = {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear and id(module) not in ids and path.rpartition(".")[2] not in used_otherwise
    }
    if not found:
        raise ConfigError(
            f"lora.loadIn4Bit: a {model.config.model_type} has no linear layers that can be in 4 bits; set it false"
        )
    return found


def weights(model: Any, config: LoraConfig) -> list[str]:
    """Return the names of the weights that go into 4 bits."""
    return [f"{path}.weight" for path in layers(model, config)]


def quantize(model: Any, config: LoraConfig, device: torch.device) -> None:
    """Replace `layers` by such in 4 bits on `device`, one by one: it never holds them as they were.

    Collective: their values are those that rank 0 has.
    """
    for path, layer in layers(model, config).items():
        model.set_submodule(path, _Layer(layer, device))
