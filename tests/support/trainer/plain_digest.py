"""The first number of a digest on GPUs, by its definition."""

import torch
from torch import Tensor

from grpo_workload.weights.digest import mix


def plain_order(wide_M: Tensor) -> int:
    """Return the sum of numbers on the CPU (`digest.wide`), folded, each times an odd one by its place."""
    words_M = wide_M.to(torch.int64)
    words_M = words_M ^ ((words_M >> 32) & 0xFFFFFFFF)
    odd_M = mix(torch.arange(len(words_M), dtype=torch.int32)).to(torch.int64) & 0xFFFFFFFF | 1
    return int((odd_M * words_M).sum())
