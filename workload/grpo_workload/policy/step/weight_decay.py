"""AdamW's weight decay, which spares biases and norms, for an optimizer with one group of parameters.

With a second group, which has no decay, DeepSpeed's universal checkpoints count AdamW's steps wrongly, and under ZeRO-3
give both groups the decay of the first. So AdamW gets no decay of its own, and weights shrink right before its step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decaying(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that decay, by name: those of transformers' `Trainer.get_decay_parameter_names`."""
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    spared = {id(parameter) for norm in norms for parameter in norm.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in spared and not _SPARED.search(name.lower())
    }


def decay_weights(optimizer: Any, model: nn.Module, weight_decay: float) -> None:
    """Multiply weights of `model` by 1 - learning rate x `weight_decay` in each step that AdamW takes.

    This is the first line of AdamW's update (Loshchilov and Hutter, arXiv:1711.05101), as torch computes it. A step
    that DeepSpeed skips does not reach AdamW, and does not decay.

    Args:
        optimizer: AdamW with a `weight_decay` of 0, or what DeepSpeed has put around it.
        model: whose parameters it updates, or the copies and partitions that DeepSpeed keeps of them.
        weight_decay: AdamW's factor, 0 to 1.
    """
    parameters = list(decaying(model).values())

    @torch.no_grad()
    def decay(adam: torch.optim.Optimizer, *_: Any) -> None:
        for group in adam.param_groups:
            for part in _updated(optimizer, parameters, {id(tensor) for tensor in group["params"]}):
                part.mul_(1 - group["lr"] * weight_decay)

    getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(decay)


def _updated(optimizer: Any, parameters: Sequence[Any], tensors: set[int]) -> Iterator[Tensor]:
    """Yield this rank's part of each of `parameters` as AdamW updates it, if in the tensors of these ids."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3: AdamW gets one flat tensor after another
        for parameter in parameters:
            place, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            flat = optimizer.fp32_partitioned_groups_flat[place]
            if id(flat) in tensors:
                yield flat.narrow(0, start, length)
    elif hasattr(optimizer, "fp32_groups"):  # half precision without ZeRO: a copy of each in float32
        (weights,), (copies,) = optimizer.fp16_groups, optimizer.fp32_groups
        copy_of = {id(weight): copy for weight, copy in zip(weights, copies, strict=True)}
        yield from (copy_of[id(parameter)] for parameter in parameters)
    elif hasattr(parameters[0], "_hp_mapping"):  # ZeRO-1 and 2: a flat tensor, in which other ranks' parts are not
        yield from (each._hp_mapping.hp_fragment for each in parameters if each._hp_mapping is not None)
    else:  # without gradients, AdamW updates nothing: so a step is skipped where the trainer clips
        yield from (each for each in parameters if each.grad is not None)
