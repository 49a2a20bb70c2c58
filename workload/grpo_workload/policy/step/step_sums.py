"""Metrics of the micro-batches of a step, added up over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_workload.algorithm import mismatch
from grpo_workload.algorithm.loss import LossOutput, token_means

Numbers = dict[str, Tensor]


class StepSums:
    """Sums and maxima of a step's metrics. They stay on the device until `reduce`: nothing waits for it earlier."""

    def __init__(self, *, counts: bool = True) -> None:
        """Start with no micro-batch. Without `counts`, another rank adds the same ones."""
        self._counts = counts
        self._loss: Numbers = {}
        self._sums: Numbers = {}
        self._largest: Numbers = {}

    def add(self, output: LossOutput, differences: tuple[Numbers, Numbers]) -> None:
        """Add a micro-batch's share of the loss and of its metrics, and its `mismatch.tally` as `differences`."""
        self._loss = _added(self._loss, {"loss": output.loss.detach(), **output.metrics})
        self._sums = _added(self._sums, differences[0])
        self._largest = {
            name: torch.maximum(self._largest.get(name, value), value) for name, value in differences[1].items()
        }

    def reduce(self, num_tokens: int) -> dict[str, float]:
        """Return the metrics of the whole step, with `num_tokens` tokens in its loss; collective."""
        own = self._loss | self._sums
        own = own if self._counts else {name: torch.zeros_like(value) for name, value in own.items()}
        sums = _over_ranks(own, dist.ReduceOp.SUM)
        largest = _over_ranks(self._largest, dist.ReduceOp.MAX)
        loss = {name: float(sums[name]) for name in self._loss}
        total = loss.pop("loss")
        return {"loss": total, **token_means(loss, num_tokens), **mismatch.describe(sums, largest, loss["num_tokens"])}


def _added(sums: Numbers, values: Numbers) -> Numbers:
    return {name: sums[name] + value if name in sums else value for name, value in values.items()}


def _over_ranks(numbers: Numbers, how: dist.ReduceOp.RedOpType) -> Numbers:
    """Reduce all `numbers` in one collective; returns them on the CPU."""
    sizes = [value.numel() for value in numbers.values()]
    packed = torch.cat([value.double().flatten() for value in numbers.values()])
    dist.all_reduce(packed, op=how)
    parts = torch.split(packed.cpu(), sizes)
    return {name: part.reshape(value.shape) for (name, value), part in zip(numbers.items(), parts, strict=True)}
