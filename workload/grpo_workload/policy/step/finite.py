"""Weights, losses and gradients that are not finite (NaN or infinite): found on every rank before they do harm."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_spec.words import counted


class NotFiniteError(Exception):
    """Training cannot go on with numbers that are not finite; the same on all ranks."""


def poisoned(loss: Tensor) -> Tensor:
    """Return `loss`; if it is infinite, its gradients become NaN, so that the gradients' norm tells on every rank."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def clip_or_drop(module: nn.Module, limit: float) -> tuple[float, bool]:
    """Scale gradients down to the global norm `limit`; drop them if their norm is not finite on any rank; collective.

    Returns the norm before, and whether they were dropped: an optimizer then changes neither weights nor its states.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    # In float32, whatever the gradients' dtype. Reading it waits for the device, as the end of the step does, too.
    norm = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()
    if not on_all_ranks(norm.isfinite()):
        for parameter in module.parameters():
            parameter.grad = None
        return float(norm), True
    if 0 < limit < norm:
        torch._foreach_mul_(gradients, limit / float(norm))
    return float(norm), False


def on_all_ranks(is_finite: Tensor) -> Tensor:
    """Return where `is_finite` (bool, any shape) holds on every rank; collective."""
    flags = is_finite.int()
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return flags.bool()


@torch.no_grad()
def broken_weights(module: nn.Module) -> list[str]:
    """Return the names of trained weights that are not finite, from the shards of all ranks; collective."""
    named = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    # The largest absolute value is NaN or infinite exactly if some value is. `isfinite` would need memory.
    largest = [torch.linalg.vector_norm(_shard(weight), torch.inf) for weight in named.values()]
    flags = on_all_ranks(torch.stack(largest).isfinite()).tolist()
    return [name for name, is_finite in zip(named, flags, strict=True) if not is_finite]


def check_weights(module: nn.Module, step: int) -> None:
    """Raise NotFiniteError on all ranks if a trained weight is not finite after `step` optimizer steps; collective."""
    if broken := broken_weights(module):
        raise NotFiniteError(
            f"after step {step}, {counted(len(broken), 'weight is', 'weights are')} NaN or infinite, for example "
            f"{broken[0]}: no checkpoint is written, and earlier ones stay. Steps with such a loss or gradients "
            "change no weight, so suspect the base model or a GPU; a new job on other nodes continues from the last "
            "checkpoint with storage.resumeFrom"
        )


def _shard(weight: Any) -> Tensor:
    """Return what this rank holds of a weight, without padding, whose values are arbitrary; never empty."""
    if not hasattr(weight, "ds_tensor"):
        return cast(Tensor, weight.detach())
    shard = weight.ds_tensor.detach()
    own = shard[: max(0, weight.ds_numel - dist.get_rank() * shard.numel())]
    return own if own.numel() else torch.zeros_like(shard[:1])
