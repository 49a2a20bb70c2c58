"""Small changes of a weight after the trainer has taken its digest, as if memory or a network had made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from grpo_workload.weights import digest

CHANGES = ("bit", "ulps", "rows")


def changed(tensor: Tensor, how: str) -> Tensor:
    """Return a copy with one bit flipped, two numbers moved by one ulp in opposite directions, or two rows swapped."""
    made = tensor.clone()
    bits = digest.words(made.view(-1))  # a view
    if how == "bit":
        bits[len(bits) // 2] ^= 1
    elif how == "ulps":
        bits[0] += 1
        bits[-1] -= 1
    else:
        made[[0, -1]] = tensor[[-1, 0]]
    assert not torch.equal(made, tensor)
    return made


def changing(wanted: str, how: str) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    """Return what stands in for `with_sums`, and changes the weight `wanted` after its digest."""

    def with_sums(weights: Iterable[tuple[str, Tensor]], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in digest.with_sums(weights, device):
            yield name, changed(tensor, how) if name == wanted else tensor

    return with_sums
