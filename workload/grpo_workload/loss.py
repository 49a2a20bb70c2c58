"""The GRPO loss and its variants, as sums over tokens divided by a global denominator.

Because the denominator counts the whole step, micro-batches and ranks only ever add up: how a step is cut changes nothing.
Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What a step's loss is divided by: counts over ALL micro-batches and ranks (all-reduce the counts, then build it)."""

    num_sequences: int  # completions, those left out of the loss included
    num_tokens: int  # completion tokens in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's share of the step's loss: shares (and their gradients) are summed over micro-batches and ranks."""

    loss: Tensor  # scalar with a graph
    metrics: dict[str, Tensor]  # detached SUMS over tokens under TRL's names, and their count as num_tokens; add up, then token_means()


def grpo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    scale: LossScale,
    loss_type: LossType,
    epsilon: float,
    epsilon_high: float | None,
    beta: float,
    max_completion_length: int,
    ref_logprobs_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
) -> LossOutput:
    """Clipped policy loss plus `beta` times the KL divergence from the reference (k3 times the ratio), as TRL 1.16 has them by default.

    On-policy (one optimizer step a batch), pass `logprobs_BT.detach()` as `old_logprobs_BT`. `weights_BT` weigh the clipped loss, not the
    divergence (`mismatch.weights`). Multiply by the world size before backward where the engine averages gradients over ranks (DeepSpeed
    does). With mask 0 everywhere the loss is 0 with a graph.

    Token losses are summed and divided by: the step's tokens in the loss (dapo, arXiv:2503.14476), the sequence's own tokens and the
    step's sequences (grpo, arXiv:2402.03300), or sequences x `max_completion_length` (dr_grpo, arXiv:2503.20783). `epsilon_high` None
    means `epsilon`. Names of metrics: num_tokens, clip_ratio/{low,high,region}_mean, entropy if `entropy_BT` is given, kl if `beta` > 0.
    """
    assert (beta > 0) == (ref_logprobs_BT is not None), "reference log-probabilities go with beta > 0"
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    masked_BT = mask_BT == 0
    advantages_B1 = advantages_B.unsqueeze(1)

    # What stands at masked places is arbitrary: exp() of it might overflow, and inf * 0 is NaN.
    ratio_BT = (logprobs_BT - old_logprobs_BT).masked_fill(masked_BT, 0.0).exp()
    token_loss_BT = -torch.min(ratio_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    if weights_BT is not None:
        token_loss_BT = (token_loss_BT * weights_BT).masked_fill(masked_BT, 0.0)

    is_low_BT = (ratio_BT < low) & (advantages_B1 < 0)
    is_high_BT = (ratio_BT > high) & (advantages_B1 > 0)
    per_token = {
        "clip_ratio/low_mean": is_low_BT.float(),
        "clip_ratio/high_mean": is_high_BT.float(),
        "clip_ratio/region_mean": (is_low_BT | is_high_BT).float(),
    }
    if entropy_BT is not None:
        per_token["entropy"] = entropy_BT.masked_fill(masked_BT, 0.0)
    if ref_logprobs_BT is not None:
        log_ratio_BT = (ref_logprobs_BT - logprobs_BT).masked_fill(masked_BT, 0.0)
        k3_BT = log_ratio_BT.exp() - log_ratio_BT - 1  # http://joschu.net/blog/kl-approx.html
        # The gradient of k3 alone is not that of the divergence, also where the ratio is 1 (DeepSeek-V3.2, arXiv:2512.02556).
        kl_BT = k3_BT * ratio_BT
        per_token["kl"] = kl_BT.detach()
        token_loss_BT = token_loss_BT + beta * kl_BT

    metrics = {name: (values_BT * mask_BT).sum() for name, values_BT in per_token.items()}
    loss = _aggregate(token_loss_BT * mask_BT, mask_BT, scale, loss_type, max_completion_length)
    return LossOutput(loss=loss, metrics={"num_tokens": mask_BT.sum(), **metrics})


def token_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Summed metrics of a step (over micro-batches and ranks) -> means over tokens under TRL's names; 0 when no token was in the loss."""
    num_tokens = max(metrics["num_tokens"], 1)
    return {name: value / num_tokens for name, value in metrics.items() if name != "num_tokens"}


def _aggregate(token_loss_BT: Tensor, mask_BT: Tensor, scale: LossScale, loss_type: LossType, max_completion_length: int) -> Tensor:
    match loss_type:
        case "dapo":
            return token_loss_BT.sum() / max(scale.num_tokens, 1)
        case "grpo":
            return (token_loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / scale.num_sequences
        case "dr_grpo":
            return token_loss_BT.sum() / (scale.num_sequences * max_completion_length)
