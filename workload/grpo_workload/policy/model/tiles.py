"""MLPs that compute tiles of tokens one after another, so that what is between their layers exists for one tile.

Between its layers an MLP is several times as wide as the model, so of a long micro-batch this is the largest part of
what a layer computes again in the backward pass. Only for jobs with `parallelism.gradientCheckpointing`: others keep
all activations until the backward pass, to compute nothing twice, and tiles would do just that. Micro-batches of at
most `TILE` tokens are computed as before. Sums over tiles are rounded to the weights' dtype, as over micro-batches.

A tile saves nothing but its input. The checkpoint of the layer around it computes the layer again up to the last tensor
that it has saved: that is the MLP's input, as it is saved before the first tile, unless a norm follows the MLP. So each
tile is computed again once, and not twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

TILE = 8192
"""Tokens of a tile: enough that kernels are as fast as with more."""
UNTILED = "_grpo_untiled"
"""Attribute of a wrapped MLP: its forward for one tile."""
_IS_ON = "_grpo_is_tiled"


def wrap(model: Any) -> None:
    """Make the dense MLPs of `model` able to compute in tiles, which `turn` turns on; before adapters are added.

    Those that are not known to treat each token alone, and experts, which get few of the tokens each, stay as they are.
    """
    for path, module in model.get_decoder().named_modules():
        if "experts" not in path.split(".") and _is_mlp(module):
            setattr(module, UNTILED, module.forward)
            module.forward = MethodType(_forward, module)


def turn(model: nn.Module, *, on: bool) -> None:
    """Make wrapped MLPs compute in tiles, or as they did before."""
    for mlp in wrapped(model):
        setattr(mlp, _IS_ON, on)


def wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the MLPs that `wrap` has wrapped."""
    return (module for module in model.modules() if UNTILED in vars(module))


def gather_at_once(model: nn.Module) -> None:
    """Make ZeRO-3 gather all weights of a wrapped MLP before its first tile; before DeepSpeed gets the model.

    Gathers are collective: with one for each tile, ranks whose micro-batches have other numbers of tiles would wait
    for each other forever.
    """
    from deepspeed.utils import set_z3_leaf_module  # late: plans are made where there is no DeepSpeed

    for mlp in wrapped(model):
        # Its gradients are reduced when that of its input is there. All inputs have one, also where adapters alone are
        # trained: with gradient checkpointing, transformers gives embeddings a gradient.
        set_z3_leaf_module(mlp, True)


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Within it, a backward pass that ends at hidden states leaves no gradients of wrapped MLPs for ZeRO-3's next step.

    Hooks of gathered modules fire in such passes, too: they would hand over zeros, and those of the step once more.
    """
    weights = [weight for mlp in wrapped(model) for weight in mlp.parameters()]
    for weight in weights:
        vars(weight)["ds_grad_is_ready"] = False  # DeepSpeed's name
    try:
        yield
    finally:
        for weight in weights:
            del vars(weight)["ds_grad_is_ready"]
            weight.grad = None


def _is_mlp(module: nn.Module) -> bool:
    return (
        type(module).__name__.endswith("MLP")
        and any(isinstance(child, nn.Linear) for child in module.children())
        and all(not [*child.children()] for child in module.children())
        and len(signature(module.forward).parameters) == 1
    )


def _forward(mlp: Any, hidden: Tensor) -> Tensor:
    compute = getattr(mlp, UNTILED)
    if not getattr(mlp, _IS_ON, False) or hidden.size(-2) <= TILE:
        output: Tensor = compute(hidden)
        return output
    if not torch.is_grad_enabled():
        return torch.cat([compute(tile) for tile in torch.split(hidden, TILE, dim=-2)], dim=-2)
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules())  # of adapters
    tiles, place = _Tiles(hidden), hidden.new_empty(0)
    # The layer's checkpoint must not see `place`, which only says which device it is, as a tensor to compute again.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        outputs = [
            checkpoint(
                lambda _, index=index: compute(tiles.take(index)), place, use_reentrant=False, preserve_rng_state=draws
            )
            for index in range(tiles.count)
        ]
    return torch.cat(outputs, dim=-2)


class _Tiles:
    """The tiles of an input: each once for the forward pass, and once from what autograd has saved."""

    def __init__(self, hidden: Tensor) -> None:
        self._saved: Tensor | None = _Save.apply(hidden, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        self._first: list[Tensor | None] = [*torch.split(hidden, TILE, dim=-2)]
        self._again: tuple[Tensor, ...] = ()
        self.count = self._left = len(self._first)

    def take(self, index: int) -> Tensor:
        tile, self._first[index] = self._first[index], None
        if tile is not None:
            return tile
        if self._saved is not None:  # may be read once
            node: Any = self._saved.grad_fn
            (hidden,) = node.saved_tensors
            self._again, self._saved = torch.split(hidden, TILE, dim=-2), None
        tile, self._left = self._again[index], self._left - 1
        if not self._left:
            self._again = ()
        return tile


class _Save(torch.autograd.Function):
    """Saves a tensor as operators do, so that the layer's checkpoint, and what is around it, drop or move it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on it")
