"""The tokens of a step that `topEntropyQuantile` keeps: those of the highest entropies, over all ranks.

"Beyond the 80/20 Rule" (arXiv:2506.01939) trains on the 20% of tokens at which the policy hesitates. TRL takes the
quantile of each micro-batch; here it is the step's, so the cut into micro-batches changes nothing.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_workload.algorithm.loss import EntropyCut

_ROUNDING = 1e-5
"""Entropies that differ by no more than this part are the same."""


def find_cut(entropies_K: Tensor, share: float) -> EntropyCut:
    """Return the cut below the highest `share` of the entropies: they are those that `torch.quantile` would keep.

    It lies between two tokens, so that their entropies may be rounded otherwise when they are computed again. The first
    tokens of completions of one prompt have the same entropy but for rounding, and are kept together.
    """
    if not len(entropies_K):
        return EntropyCut(threshold=0.0, num_tokens=0)
    sorted_K = entropies_K.double().sort().values
    first = math.ceil((1 - share) * (len(sorted_K) - 1) - 1e-9)
    first = int((sorted_K < sorted_K[first] * (1 - _ROUNDING)).sum())
    threshold = (sorted_K[max(first - 1, 0)] + sorted_K[first]) / 2
    return EntropyCut(threshold=threshold.item(), num_tokens=int((sorted_K >= threshold).sum()))


def of_all_ranks(values_K: Tensor) -> Tensor:
    """Return the values of all ranks, which may have different numbers of them; collective."""
    own = torch.tensor([len(values_K)], device=values_K.device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    counts = [int(size) for size in sizes]
    padded = torch.nn.functional.pad(values_K, (0, max(counts) - len(values_K)))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
