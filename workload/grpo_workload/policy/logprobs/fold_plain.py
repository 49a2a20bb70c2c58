"""The two passes of `logprobs` over a slice of the logits, in plain PyTorch; `fold_triton` has them for GPUs.

Shapes: K tokens, W words of the slice.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(logits_KW: Tensor, places_K: Tensor, scale: float, state_4K: Tensor) -> None:
    """Add a slice of the logits to the running softmax (arXiv:1805.02867) in `state_4K`.

    Its rows: largest logit, sum of exp(logit - largest), that sum with each term multiplied by its logit, logit of the
    target. `places_K` are the targets' words, counted from the slice's first; a place outside the slice has its target
    in another slice.
    """
    scaled_KW = logits_KW.float() * scale
    largest_K = torch.maximum(state_4K[0], scaled_KW.amax(dim=1))
    weights_KW = (scaled_KW - largest_K.unsqueeze(1)).exp()
    state_4K[1:3] *= (state_4K[0] - largest_K).exp()
    state_4K[0] = largest_K
    state_4K[1] += weights_KW.sum(dim=1)
    state_4K[2] += (weights_KW * scaled_KW).sum(dim=1)
    inside_K = (places_K >= 0) & (places_K < logits_KW.size(1))
    found_K = scaled_KW.gather(1, places_K.where(inside_K, 0).unsqueeze(1)).squeeze(1)
    state_4K[3] = torch.where(inside_K, found_K, state_4K[3])


def unfold(
    logits_KW: Tensor,
    places_K: Tensor,
    lse_K: Tensor,
    gradient_K: Tensor,
    scale: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Overwrite a slice of the logits by its gradient: `gradient_K` x (1 at the target, else 0, - probability).

    With entropies and their gradient, plus gradient x - probability x (log-probability + entropy).
    """
    logprobs_KW = logits_KW.float() * scale - lse_K.unsqueeze(1)
    probabilities_KW = logprobs_KW.exp()
    is_target_KW = torch.arange(logits_KW.size(1), device=logits_KW.device) == places_K.unsqueeze(1)
    change_KW = (is_target_KW.float() - probabilities_KW) * (gradient_K * scale).unsqueeze(1)
    if entropy is not None:
        entropy_K, entropy_gradient_K = entropy
        spread_KW = probabilities_KW * (logprobs_KW + entropy_K.unsqueeze(1))
        # A word of probability 0 may have a logit of minus infinity.
        change_KW -= spread_KW.masked_fill(probabilities_KW == 0, 0.0) * (entropy_gradient_K * scale).unsqueeze(1)
    logits_KW.copy_(change_KW)
