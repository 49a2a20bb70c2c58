"""Moves what a model's layers compute by as much as rounding does, to see what that does to its log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def rounded_anew(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Within it, each layer with weights gives numbers that are up to one place of their last bit away, at random.

    Two programs that compute the same model differ about as much. It takes no memory for other weights, and works under
    any stage of ZeRO. The same `seed` gives the same numbers.
    """
    randoms: dict[torch.device, torch.Generator] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(one) for one in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        random = randoms.setdefault(value.device, torch.Generator(value.device).manual_seed(seed))
        steps = 2 * torch.rand(value.shape, generator=random, device=value.device) - 1
        return (value.float() * (1 + steps * torch.finfo(value.dtype).eps)).to(value.dtype)

    layers = [layer for layer in model.modules() if any(one is not None for one in layer._parameters.values())]
    hooks = [layer.register_forward_hook(lambda _layer, _args, output: moved(output)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
