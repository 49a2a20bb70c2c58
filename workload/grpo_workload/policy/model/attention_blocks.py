"""Attention over packed sequences with soft caps and sinks, which no kernel has: plain arithmetic, block by block.

The scores of one block of queries exist at a time, and again in the backward pass. So memory grows with the longest
sequence, not with its square. Keys that no query of a block may see are left out.

Shapes: S sequences, packed end to end into N tokens; H query heads, G key and value heads, D head size; a block has R
queries and sees K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS = 256
"""Queries of a block: for 16 heads and 8192 keys, its scores take 128 MiB in float32."""


def attend_in_blocks(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    starts: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute causal attention [N, H, D] of each token to the tokens of its own sequence.

    Args:
        query_NHD: queries.
        key_NGD: keys.
        value_NGD: values; their head size may be another one, which the result then has.
        starts: [S + 1]: the offset at which each sequence begins, and N.
        scale: factor of the scores.
        window: number of last tokens that are attended to, including the token itself; None is all.
        softcap: scores become softcap x tanh(score / softcap); None leaves them.
        sinks_H: scores of a place without a value, to which each token of a head attends, too; None is no such place.
    """
    places_N = torch.arange(len(query_NHD), device=query_NHD.device)
    first_N = starts[:-1].repeat_interleave(starts.diff(), output_size=len(query_NHD)).to(places_N.dtype)
    if window is not None:
        first_N = torch.maximum(first_N, places_N - window + 1)
    rows = []
    for begin, first in zip(range(0, len(query_NHD), ROWS), first_N[::ROWS].tolist(), strict=True):
        block, seen = slice(begin, begin + ROWS), slice(first, begin + ROWS)
        is_seen_RK = (places_N[seen] >= first_N[block, None]) & (places_N[seen] <= places_N[block, None])
        inputs = query_NHD[block], key_NGD[seen], value_NGD[seen], is_seen_RK, scale, softcap, sinks_H
        rows.append(checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(rows)


def _attend(
    query_RHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    is_seen_RK: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    num_rows, num_heads, size = query_RHD.shape
    groups = key_KGD.size(1)  # M query heads share a key head
    query_GMRD = query_RHD.reshape(num_rows, groups, num_heads // groups, size).permute(1, 2, 0, 3)
    scores_GMRK: Tensor = (query_GMRD @ key_KGD.permute(1, 2, 0).unsqueeze(1)).float() * scale
    if softcap is not None:
        scores_GMRK = (scores_GMRK / softcap).tanh() * softcap
    scores_GMRK = scores_GMRK.masked_fill(~is_seen_RK, -torch.inf)
    total_GMR1 = scores_GMRK.logsumexp(dim=-1, keepdim=True)
    if sinks_H is not None:
        total_GMR1 = torch.logaddexp(total_GMR1, sinks_H.float().view(*total_GMR1.shape[:2], 1, 1))
    weights_GMRK = (scores_GMRK - total_GMR1).exp().to(value_KGD.dtype)
    return (weights_GMRK @ value_KGD.transpose(0, 1).unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
