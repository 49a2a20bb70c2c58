"""Tensor to data parallel 3:1 in training, beside ZeRO-3 alone, for models above 20 billion parameters. In numbers.

The trainer splits no layers: under ZeRO-3 each rank gathers whole layers. Splitting each layer over t ranks would
gather a t-th of them, but sum the activations of all tokens of t ranks four times a layer.
"""

from __future__ import annotations

from typing import NamedTuple

from grpo_spec.contract import Contract
from grpo_workload.capacity.shapes import Models, planned_tokens
from grpo_workload.capacity.states import BYTES
from grpo_workload.pod.model_split import split_sizes

LARGE = 20e9  # parameters
RATIO = 3
SUMS = 4  # of a layer's activations: after attention and after the MLP, forward and backward
GATHERS = 3  # of the weights in a micro-batch: forward pass, backward pass, and the reduction of their gradients


class Ratio(NamedTuple):
    """Bytes that a split would move and hold, on each GPU."""

    tensor: int
    data: int
    alone_bytes: int  # that ZeRO-3 moves for a micro-batch
    split_bytes: int  # that both move for as many tokens a GPU
    even_tokens: int  # tokens of a micro-batch on each GPU from which on ZeRO-3 alone moves less
    tokens: int  # of the micro-batch that both figures are for

    def __str__(self) -> str:
        less, more = sorted((self.alone_bytes, self.split_bytes))
        better = "ZeRO-3 alone" if self.alone_bytes <= self.split_bytes else "the split"
        return (
            f"tensor to data parallel {self.tensor}:{self.data} beside ZeRO-3 alone, for micro-batches of "
            f"{self.tokens} tokens a GPU: {self.split_bytes / 1e9:.0f} GB moved, not {self.alone_bytes / 1e9:.0f} GB; "
            f"{better} moves {more / max(1, less):.1f} times less, and ZeRO-3 alone from {self.even_tokens} tokens on"
        )


def ratio(contract: Contract, models: Models) -> Ratio | None:
    """Return the numbers of the split nearest to 3:1 that the model allows; None below 20 billion parameters."""
    shapes, world = models.shapes(contract.config), contract.world_size
    sizes = [size for size in split_sizes(shapes.fields, world) if size > 1 and world % size == 0]
    if shapes.own < LARGE or not sizes:
        return None
    tensor = min(sizes, key=lambda size: abs(size * size / world - RATIO))
    size, tokens = BYTES[contract.config.model.dtype], planned_tokens(contract, shapes)
    alone = GATHERS * size * shapes.own
    # A ring sums by sending each part twice, (t - 1) / t of it; t ranks work on the tokens of all t.
    of_token = SUMS * shapes.layers * shapes.hidden * size * 2 * (tensor - 1)
    even = int(alone * (1 - 1 / tensor) / of_token)
    return Ratio(tensor, world // tensor, alone, alone // tensor + of_token * tokens, even, tokens)
