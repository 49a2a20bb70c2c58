"""The tensors that engines get of a model with adapters: weights with the adapters merged in, or the adapters' factors.

Shapes: E experts, O outputs and I inputs of a layer, R rank of an adapter, K = E x R.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn

from grpo_spec.errors import ConfigError
from grpo_workload.weights.export import Weight, full, plain, values_of

ADAPTER = "default"  # peft's name for an unnamed adapter
SLICE_ELEMENTS = 2**22  # number of elements of a weight that are merged at a time, in float32


def merged(model: nn.Module) -> list[Weight]:
    """Weights with the adapters merged in, under the names of the model without; no parameter is written to."""
    modules = dict(model.named_modules())
    weights = []
    for path, (parameter,), _ in full(model):
        if any(part.startswith("lora_") for part in path.split(".")) or ".original_module." in path:
            continue
        name = path.replace(f".modules_to_save.{ADAPTER}.", ".").replace(".base_layer", "")
        layer = _adapter_of(modules, path)
        if layer is None:
            weights.append(plain(name, parameter))
            continue
        if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
            of_experts, is_transposed = True, getattr(layer.get_base_layer(), "is_transposed", False)
        else:
            of_experts, is_transposed = False, layer.fan_in_fan_out
        make = partial(
            total_experts if of_experts else total, scale=layer.scaling[ADAPTER], is_transposed=is_transposed
        )
        factors_AB = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        weights.append(Weight(name, (parameter, *factors_AB), _on_values(values_of(parameter), make)))
    return weights


def _on_values(values: Callable[[Tensor], Tensor], make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda data, *factors: make(values(data), *factors)


def _adapter_of(modules: dict[str, nn.Module], path: str) -> Any:
    """The layer that adapts the parameter `path`, if any; peft nests one in another for each parameter of experts."""
    owner, _, name = path.rpartition(".")
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
        if getattr(modules[owner], "parameter_name", "weight") == name and isinstance(modules[owner], LoraLayer):
            return modules[owner]
    return None


def factors(model: nn.Module) -> list[Weight]:
    """The adapters of a model, by the names of the modules; B is already multiplied by the scale of B A."""
    weights = []
    for path, layer in model.named_modules():
        if isinstance(layer, ParamWrapper):
            raise ConfigError(
                f"lora.push: adapters cannot send those of parameters, such as {layer.parameter_name} of experts; use "
                "push merged, or name other modules in lora.targetModules"
            )
        if isinstance(layer, LoraLayer):
            a_RI, b_OR = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            weights.append(plain(f"{path}.lora_A.weight", a_RI))
            scaled = partial(torch.mul, other=layer.scaling[ADAPTER])
            weights.append(Weight(f"{path}.lora_B.weight", (b_OR,), scaled))
    return weights


def total(base: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float, is_transposed: bool) -> Tensor:
    """Compute `base + scale * B A` in `base`'s dtype, rounded once and with little memory besides the result.

    Args:
        base: a layer's weight: [O, I], or [I, O] if `is_transposed`.
        a_RI: the adapter's factor A.
        b_OR: the adapter's factor B.
        scale: factor of their product.
        is_transposed: the layer stores its weight transposed, as transformers' Conv1D does.
    """
    left, right = (a_RI.T, b_OR.T) if is_transposed else (b_OR, a_RI)
    if base.is_cuda:  # cuBLAS adds up in float32, and does not split a dimension as small as R
        return torch.addmm(base, left, right, alpha=scale)
    out = torch.empty_like(base)
    right_float = right.float()
    rows = max(1, SLICE_ELEMENTS // out.size(1))
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        out[part] = torch.addmm(base[part].float(), left[part].float(), right_float, alpha=scale)
    return out


def total_experts(base: Tensor, a_KI: Tensor, b_OK: Tensor, *, scale: float, is_transposed: bool) -> Tensor:
    """Compute `total` for each of E stacked experts, whose factors peft stacks, too (K = E x R).

    Args:
        base: weights: [E, O, I], or [E, I, O] if `is_transposed`.
        a_KI: factors A, expert by expert.
        b_OK: factors B; neighbouring columns belong to different experts.
        scale: factor of their products.
        is_transposed: the experts store their weights transposed.
    """
    a_ERI = a_KI.view(len(base), -1, a_KI.size(1))
    b_EOR = b_OK.view(b_OK.size(0), -1, len(base)).permute(2, 0, 1)
    if base.is_cuda:
        left, right = (a_ERI.mT, b_EOR.mT) if is_transposed else (b_EOR, a_ERI)
        return torch.baddbmm(base, left, right, alpha=scale)
    return torch.stack(
        [
            total(one, a_RI, b_OR, scale=scale, is_transposed=is_transposed)
            for one, a_RI, b_OR in zip(base, a_ERI, b_EOR, strict=True)
        ]
    )
