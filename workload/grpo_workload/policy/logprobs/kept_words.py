"""The words that truncated sampling could choose for each token, as the output layer's own logits say: one bit each.

They are found once, in the forward pass, and are a constant for the gradient. With bits, forward and backward pass
agree on every word, however logits are rounded when they are computed again by slices of the vocabulary.

Shapes: K tokens, H hidden size, V vocabulary, W words of a slice, Y bytes of a row of bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_workload.algorithm.penalties import Penalised
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.model.logit_change import LogitChange

LOGITS = 2**23
"""Number of logits that exist at once while whole rows of them are sorted; sorting takes some 30 bytes for each."""

HIDDEN = -6e4
"""The logit of a word that is left out: finite in float16, and of probability 0 next to any that is kept."""

_BITS = tuple(1 << place for place in range(8))


def find_kept(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_K: Tensor,
    truncation: Truncation,
    change: LogitChange,
    penalised: Penalised | None = None,
) -> Tensor:
    """Return the bits [K, Y] of the words that `truncation` keeps; the targets, which were sampled, are always kept."""
    num_words = weight_VH.size(0)
    kept_KY = hidden_KH.new_empty(len(targets_K), -(-num_words // 8), dtype=torch.uint8)
    rows = max(1, LOGITS // num_words)
    for start in range(0, len(targets_K), rows):
        part = slice(start, start + rows)
        logits_KV = change.apply(torch.nn.functional.linear(hidden_KH[part], weight_VH, bias_V))
        if penalised is not None:
            penalised.apply(logits_KV := logits_KV.float(), start, 0)
        kept_KV = truncation.kept(logits_KV)
        kept_KY[part] = _packed(kept_KV.scatter_(1, targets_K[part].unsqueeze(1), True))
    return kept_KY


def hide_others(logits_KW: Tensor, kept_KY: Tensor, start: int) -> None:
    """Overwrite the logits of words that are not kept, in a slice that begins with the word `start`."""
    assert start % 8 == 0, "a byte of bits belongs to one slice"
    num_words = logits_KW.size(1)
    bytes_KY1 = kept_KY[:, start // 8 : -(-(start + num_words) // 8)].unsqueeze(2)
    is_out_KW = (bytes_KY1 & bytes_KY1.new_tensor(_BITS)).eq_(0).flatten(1)[:, :num_words]
    logits_KW.masked_fill_(is_out_KW.bool(), HIDDEN)


def _packed(kept_KV: Tensor) -> Tensor:
    padded_KV = torch.nn.functional.pad(kept_KV.to(torch.uint8), (0, -kept_KV.size(1) % 8))
    return (padded_KV.view(len(kept_KV), -1, 8) * padded_KV.new_tensor(_BITS)).sum(dim=2, dtype=torch.uint8)
