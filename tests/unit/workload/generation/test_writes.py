"""Changes that loaders make to weights before they copy them are no difference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grpo_workload.generation.writes import Writes
from grpo_workload.weights.digest import with_sums


class OfAnotherRank(nn.Module):
    """Adds a bias on one of several ranks alone, so another has zeros in place of it: vLLM's GPT-OSS does so."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 8), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            weight.zero_()
            self.bias.copy_(weight)


def test_a_loader_may_change_what_has_arrived() -> None:
    model = OfAnotherRank()
    for _ in range(3):
        writes = Writes(model, is_quantized=False)
        with torch.no_grad(), writes:
            sent = with_sums([("bias", torch.randn(4, 8))], "cpu")
            writes.load(model.load_weights, ((name, tensor.clone()) for name, tensor in sent))
        writes.check_arrived()
        writes.check_kept()
